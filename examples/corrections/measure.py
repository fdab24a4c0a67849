"""Speed-up of corrections by copying: tokens per target call, by file and gamma.

    python examples/corrections/measure.py --gamma 4 8 15 --json benchmarks/copying.json \\
        --data dev_errors.tsv.gz dev_misspelt.tsv.gz jfleg_dev.tsv

A line of a file is a text with errors, a tab, and the correct text. The target decodes its own
correction at temperature 0; its quality is reported beside the block efficiency. The speed-up
predicted for T5-XXL on a TPU-v4 is the block efficiency over the cost of verification there
(benchmarks/tpu_v4_xxl.json), since drafting by copying costs almost nothing.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corrections import Correction, figures, intervals

from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.benchmark.evaluation import evaluate
from spec_t5x.labs.metrics import TextPairs
from spec_t5x.labs.text_pairs import read_pairs
from spec_t5x.labs.tpu.chips import CHIPS
from spec_t5x.labs.tpu.step_costs import StepCost
from spec_t5x.machine.description import machine

_XXL = Path(__file__).parents[2] / "benchmarks" / "tpu_v4_xxl.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes JSON if asked to; returns 0, or 2 on an input error."""
    parser = argparse.ArgumentParser(
        prog="measure.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", default="t5-target", help="checkpoint (t5-target)")
    add("--draft", default="copy", help="draft, as for spec-t5x generate (copy)")
    add("--data", nargs="+", required=True, metavar="FILE", help=".tsv or .tsv.gz")
    add("--prefix", default="correct: ", metavar="TEXT", help="text before each source (correct: )")
    add("--gamma", nargs="+", type=int, default=[4, 8, 15], help="drafts per iteration, from 1")
    add("--batch_size", type=int, default=32, help="texts decoded together (32)")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    args = parser.parse_args(arguments)
    if min(args.gamma) < 1:
        parser.error(f"--gamma is {min(args.gamma)}: give at least 1")
    try:
        generator, rows = Generator.load(args.target, args.draft), []
        for file in args.data:
            texts = [Correction(*pair) for pair in read_pairs(file)]
            pairs = [(args.prefix + text.source, text) for text in texts]
            scored = TextPairs(pairs=pairs, metric=figures, intervals=intervals)
            for gamma in args.gamma:
                options = GenerateOptions(gamma=gamma, batch_size=args.batch_size)
                found = evaluate(generator, scored, options)
                rows.append({"text": Path(file).name, "gamma": gamma} | found.to_dict())
        models = {"target": Path(args.target).name, "draft": results.without_folder(args.draft)}
        values = {"machine": machine(), **models, "rows": rows}
        results.show(table(values))
        if args.json:
            results.write_json(args.json, values)
    except InputError as error:
        print(f"measure: error: {error}", file=sys.stderr)
        return 2
    return 0


def table(values: Mapping[str, Any]) -> results.Table:
    """Makes a table with a line per file and a column per gamma."""
    lines: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in values["rows"]:
        lines.setdefault(row["text"], {})[row["gamma"]] = row
    columns = {
        "text": lambda line: line[0].partition(".")[0],
        "pairs": lambda line: str(next(iter(line[1].values()))["num_pairs"]),
    }
    gammas = list(dict.fromkeys(row["gamma"] for row in values["rows"]))
    for gamma in gammas:
        columns[f"block efficiency, gamma {gamma}"] = lambda line, g=gamma: _cell(line[1][g])
    most = gammas[-1]
    columns[f"predicted for XXL on a TPU-v4, gamma {most}"] = lambda line: (
        f"{line[1][most]['block_efficiency'] / verification_cost(most + 1):.1f}"
    )
    return results.table(columns, list(lines.items()))


def verification_cost(positions: int) -> float:
    """Returns the roofline time of T5-XXL's call over ``positions`` on a TPU-v4, in plain steps."""
    steps = json.loads(_XXL.read_text(encoding="utf-8"))["results"][0]["steps"]
    stored = next(step["cost"] for step in steps if step["kind"] == "plain")
    fields = {field.name: stored[field.name] for field in dataclasses.fields(StepCost)}
    plain, chip = StepCost(**fields | {"collectives": ()}), CHIPS["v4"]
    larger = dataclasses.replace(plain, operations=positions * plain.operations)
    return larger.seconds(chip) / plain.seconds(chip)


def _cell(row: Mapping[str, Any]) -> str:
    ends = row["intervals"].get("block_efficiency")
    return f"{row['block_efficiency']:.2f}" + (f" ({ends[0]:.2f}–{ends[1]:.2f})" if ends else "")


if __name__ == "__main__":
    sys.exit(main())
