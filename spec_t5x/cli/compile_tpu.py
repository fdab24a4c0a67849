"""``spec-t5x compile-tpu``: compiled for a TPU on a machine without one, and what it brings."""

import argparse
from pathlib import Path

from spec_t5x.errors import InputError

HELP = "compile for a TPU without one: memory, costs, predicted speed-up"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add("--topology", default="v4:2x2x1", metavar="CHIP:XxYxZ", help="the slice (v4:2x2x1)")
    add("--target", default="t5_1_1_xxl", metavar="SIZE", help="a published size (t5_1_1_xxl)")
    add(
        "--draft",
        action="append",
        metavar="SIZE",
        help="a published size; give it again for more (t5_1_1_small)",
    )
    add("--gamma", type=int, default=7, metavar="N", help="drafts in an iteration (7)")
    add(
        "--mesh",
        action="append",
        type=_mesh,
        metavar="DATA,MODEL",
        help="chips for the batch and for each model; give it again for more (1,1)",
    )
    add("--batch", type=int, default=1, metavar="N", help="rows, over all replicas (1)")
    add("--source_len", type=int, default=512, metavar="N", help="encoder length (512)")
    add("--max_decode_len", type=int, default=128, metavar="N", help="room for output (128)")
    add(
        "--table2",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="predict the rows of the paper's Table 2 (with the paper's target, yes)",
    )
    add("--json", type=Path, metavar="FILE", help="keep all figures there")


def run(args: argparse.Namespace) -> int:
    """Compiles, prints Markdown tables, keeps the figures as JSON if asked to."""
    from rich.console import Console

    from spec_t5x.experiments import tpu_chips, tpu_compilation

    tpu_chips.prepare_environment()
    options = tpu_compilation.Options(
        topology=args.topology,
        target=args.target,
        drafts=tuple(args.draft or ["t5_1_1_small"]),
        gamma=args.gamma,
        meshes=tuple(args.mesh or [(1, 1)]),
        work=tpu_compilation.Workload(
            batch=args.batch, source_len=args.source_len, max_decode_len=args.max_decode_len
        ),
        table_2=args.table2,
    )
    if args.json and not args.json.absolute().parent.is_dir():
        raise InputError(f"--json {args.json}: no such folder: make it first")
    console = Console(stderr=True)
    results = []
    with console.status("starting libtpu") as status:
        for result in tpu_compilation.run(options, lambda what: status.update(f"compiling {what}")):
            if not results:
                print(tpu_compilation.header(options))
            results.append(result)
            print(f"\n{tpu_compilation.tables(result, options.work)}", flush=True)
            # After every mesh: a long run that is cut short leaves what it has.
            if args.json:
                tpu_compilation.write_json(args.json, options, results)
    print(f"\n{tpu_compilation.FOOTNOTES}")
    return 0


def _mesh(text: str) -> tuple[int, int]:
    data, _, model = text.partition(",")
    try:
        return int(data), int(model)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give DATA,MODEL such as 1,4") from None
