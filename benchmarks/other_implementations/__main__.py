"""Command ``python -m benchmarks.other_implementations``: see the package."""

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

import benchmarks.other_implementations as package
from benchmarks.other_implementations import workload
from benchmarks.other_implementations.rounds import IMPLEMENTATIONS, make_rows, measure
from benchmarks.other_implementations.table import table
from spec_t5x.errors import InputError
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.reproduction.example_texts import SENTENCES
from spec_t5x.labs.text_pairs import read_pairs
from spec_t5x.machine.description import machine
from spec_t5x.names import AUTO, WEIGHTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints Markdown, writes JSON if asked to; returns 0, or 2 on an input error."""
    args = _parse(arguments)
    jax.config.update("jax_platforms", "cpu")
    groups, status = [], 0
    try:
        settings = {"threads": _pin(args.threads), "max_decode_len": args.max_decode_len}
        with tempfile.TemporaryDirectory() as folder:
            if args.size:
                alphas = tuple(args.alpha)
                if len(alphas) != len(args.draft):
                    raise InputError(
                        f"{len(args.draft)} drafts and {len(alphas)} acceptance rates: give "
                        "--alpha one for each"
                    )
                settings |= {"alphas": alphas, "source_len": args.source_len}
                settings |= {"draft": args.draft_size, "scratch": Path(folder)}
                found = workload.of_sizes(args.size, **settings)
            else:
                texts = (pair[0] for pair in read_pairs(args.data)) if args.data else SENTENCES
                texts = (args.prefix + text for text in texts)
                texts = list(itertools.islice(texts, args.num_inputs))
                pair = (args.target, args.draft[0], texts, Path(folder))
                found = [workload.of_pair(*pair, **settings)]
            for given, config in found:
                ours = (args.draft, args.gamma, args.verifier)
                rows = make_rows(given, *ours, args.others, args.weights)
                groups.append(measure(given, config, rows, args.rounds))
                if args.json:
                    values = {"machine": machine(), "groups": groups}
                    results.write_json(args.json, values)
    except InputError as error:
        print(f"other_implementations: error: {error}", file=sys.stderr)
        status = 2
    if groups or not status:
        print(table(groups, machine()))
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.other_implementations",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", default="t5-target", help="checkpoint (t5-target)")
    add(
        "--draft",
        nargs="+",
        help="drafts, as for spec-t5x generate (transformer); with --size also random (default)",
    )
    add("--weights", nargs="+", choices=WEIGHTS, default=[AUTO], help="weights of spec_t5x (auto)")
    add("--gamma", nargs="+", type=int, default=[4], help="drafts per iteration (4)")
    add("--verifier", default="block", help="verifier of spec_t5x (block)")
    add("--data", metavar="FILE", help=".tsv or .tsv.gz with sources (built-in sentences)")
    add("--prefix", default="", metavar="TEXT", help="text to put before every source")
    add("--num_inputs", type=int, default=20, help="number of sources (20)")
    add("--max_decode_len", type=int, default=64, help="most output tokens (64)")
    add("--rounds", type=int, default=5, help="runs of every row (5)")
    add("--threads", type=int, help="number of processors (all)")
    add("--others", nargs="*", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    add("--size", nargs="+", help="published sizes with random weights")
    add("--draft_size", default="t5_1_1_small", help="size of their draft (t5_1_1_small)")
    add("--alpha", nargs="+", type=float, default=[0.75], help="acceptance of each draft (0.75)")
    add("--source_len", type=int, default=64, help="tokens of a source with --size (64)")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    args = parser.parse_args(arguments)
    args.draft = args.draft or [workload.RANDOM if args.size else "transformer"]
    for name in ("num_inputs", "max_decode_len", "rounds", "source_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}: give at least 1")
    return args


def _pin(threads: int | None) -> int:
    """Pins this process and its children to ``threads`` or all processors; returns how many."""
    # macOS cannot pin; there only the libraries' thread settings apply.
    pins = hasattr(os, "sched_setaffinity")
    usable = sorted(os.sched_getaffinity(0)) if pins else range(os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= len(usable):
        raise InputError(f"threads is {threads}: give 1 to {len(usable)}, those of this process")
    if pins:
        os.sched_setaffinity(0, usable[:threads])
    return threads or len(usable)


if __name__ == "__main__":
    sys.exit(main())
