"""Speculative against plain decoding of the packaged pair, on real sentences.

    python -m spec_t5x.experiments.benchmark --data data/ende/dev.tsv.gz \
      --json benchmarks/default_pair.json

Batch 1, float32, temperatures 0 and 1, both loops in one process and in turn,
compilation apart. Beside the measured speed-up stands what Theorem 3.8 predicts from
the alpha and c of the same run, with and without the cost of verification.
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import jax

from spec_t5x.data.tsv import read_pairs
from spec_t5x.errors import InputError
from spec_t5x.experiments.comparison import Comparison, compare
from spec_t5x.generation import GenerateOptions, Generator


def main(arguments=None) -> int:
    """Measures, prints a Markdown table, keeps the figures as JSON if asked to."""
    args = _arguments(arguments)
    generator = Generator.load(args.target, args.draft)
    texts = _texts(generator, args)
    comparisons = [
        compare(
            generator,
            texts,
            GenerateOptions(gamma=gamma, temperature=temperature),
            repeats=args.repeats,
        )
        for temperature in args.temperature
        for gamma in args.gamma
    ]
    print(table(comparisons))
    if args.json:
        report = {"machine": machine(), "comparisons": [c.to_dict() for c in comparisons]}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def table(comparisons: list[Comparison]) -> str:
    """The comparisons as a Markdown table."""
    lines = [
        "| temp. | gamma | plain tok/s | speculative tok/s | speed-up | loop alone¹ "
        "| predicted² | predicted³ | alpha | c | T(gamma+1) | tokens per call | same text |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in comparisons:
        same = {None: "—", True: "yes", False: f"{len(c.divergences)} differ"}[c.identical]
        lines.append(
            f"| {c.temperature:g} | {c.gamma} | {c.plain_rate:.0f} | {c.speculative_rate:.0f} "
            f"| {c.speed_up:.2f} | {c.loop_speed_up:.2f} "
            f"| {c.predicted:.2f} | {c.predicted_with_verification:.2f} "
            f"| {c.alpha:.3f} | {c.step_times.c:.3f} | {c.step_times.verification_cost:.2f} "
            f"| {c.mean_acceptance_length:.2f} | {same} |"
        )
    lines += [
        "",
        "¹ Without dispatch, encoding and prefill, which both pay for each input. "
        "² Theorem 3.8. ³ The same with the measured cost of verification.",
    ]
    return "\n".join(lines)


def machine() -> dict:
    """What the figures were measured on."""
    return {
        "device": jax.devices()[0].device_kind,
        "platform": jax.devices()[0].platform,
        "processor": _processor(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def _processor() -> str:
    """The processor's name where the system tells it, its architecture elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _texts(generator: Generator, args) -> list[str]:
    options = GenerateOptions()
    texts = []
    for source, _ in read_pairs(args.data, 1, 2, 3):
        try:
            generator.tokenize(source, options)
        except InputError:
            continue
        texts.append(source)
        if len(texts) == args.num_inputs:
            break
    return texts


def _arguments(arguments):
    parser = argparse.ArgumentParser(prog="python -m spec_t5x.experiments.benchmark")
    parser.add_argument("--data", required=True, help="tag, English, German; .tsv or .tsv.gz")
    parser.add_argument("--target", default="ende-target")
    parser.add_argument("--draft", default="ende-draft")
    parser.add_argument("--num_inputs", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gamma", type=int, nargs="+", default=[4])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
