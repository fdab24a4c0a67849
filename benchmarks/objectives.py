"""Compares objectives of distillation: the alpha of drafts after equally many training steps.

    python -m benchmarks.objectives --data_dir data/ende --output_dir runs/objectives \\
        --json benchmarks/objectives.json

DATA_DIR holds train.tsv.gz and dev.tsv.gz (tag, English, German). Each recipe is a run of
``spec-t5x distill`` in a separate folder; the same command resumes runs that were interrupted.
Each draft starts as the first decoder layer of the packaged T5, as a translator, whose encoder it
uses. alpha is measured after the last step, on held-out texts of the target.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gin

from benchmarks import command
from spec_t5x.cli.main import main as spec_t5x
from spec_t5x.data.task_options import TRANSLATE_PREFIX
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.theory import formulas
from spec_t5x.machine.description import machine

# (objective, author of the texts, share of steps on the draft's own outputs). The first recipe,
# cross-entropy on the references, is the baseline.
RECIPES = (
    ("cross_entropy", "references", 0.0),
    ("forward_kl", "references", 0.0),
    ("cross_entropy", "target", 0.0),
    ("forward_kl", "target", 0.0),
    ("reverse_kl", "target", 0.0),
    ("jeffreys", "target", 0.0),
    ("total_variation", "target", 0.0),
    ("forward_kl", "target", 0.5),
)
SETTINGS = {
    "CHECKPOINT_PATH": "t5-target",
    "SOURCE_PREFIX": TRANSLATE_PREFIX,
    "DEV_FILE": "dev.tsv.gz",
    "DECODER_LAYERS": "first:1",
    "TRAIN_STEPS": 400,
    "DataOptions.source_column": 1,
    "DataOptions.target_column": 2,
    "DataOptions.num_columns": 3,
    "MAX_SOURCE_LENGTH": 96,
    "MAX_TARGET_LENGTH": 96,
    "DataOptions.buckets": (12, 16, 24, 32, 48, 64, 96),
    "DataOptions.tokens_per_batch": 1024,
    "DistillOptions.train_texts": 20000,
    "DistillOptions.patience": 0,
    "OptimizerOptions.learning_rate": 2e-3,
    "OptimizerOptions.warmup_steps": 20,
    "OptimizerOptions.cooldown_steps": 150,
    # Evaluates after the last step only.
    "TrainOptions.eval_period": 0,
    "TrainOptions.checkpoint_period": 100,
    "TrainOptions.tensorboard": False,
}


def measure(recipe: Sequence, settings: Mapping[str, Any], output_dir: Path) -> dict[str, Any]:
    """Trains by a recipe; returns its row: recipe, steps, and held-out alpha by temperature."""
    objective, outputs, on_policy = recipe
    folder = output_dir / f"{objective}-{outputs}-{on_policy:g}"
    bindings = {**settings, "OBJECTIVE": objective, "OUTPUTS": outputs, "ON_POLICY": on_policy}
    # Recipes share a cache, so that the target generates its texts once.
    bindings |= {"distill.cache_dir": str(output_dir)}
    train("distill_draft", folder, bindings)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines if '"held_out"' in line]
    return {
        "objective": objective,
        "outputs": outputs,
        "on_policy": on_policy,
        "steps": found[-1]["step"],
        "held_out": [each["held_out"] for each in found if each["step"] == found[-1]["step"]],
    }


def train(
    gin_file: str, folder: Path, bindings: Mapping[str, Any], command: str = "distill"
) -> None:
    """Runs ``spec-t5x COMMAND`` with a file of ``gin_configs/runs``; exits if the run fails."""
    gin.clear_config()
    bindings = {**bindings, "OUTPUT_DIR": str(folder)}
    flags = [f"--gin.{name}={value!r}" for name, value in bindings.items()]
    status = spec_t5x([command, f"--gin_file=gin_configs/runs/{gin_file}.gin", *flags])
    if status:
        sys.exit(status)


def table(rows: Sequence[Mapping[str, Any]]) -> results.Table:
    """Makes a table with a line for each recipe.

    An alpha is bold if its 95 % interval is above that of the first recipe.
    """

    def texts(row: Mapping[str, Any]) -> str:
        own = row["on_policy"]
        return row["outputs"] + (f", {own:.0%} the draft's own" if own else "")

    columns = {"objective": lambda row: row["objective"].replace("_", " "), "texts": texts}
    for i, first in enumerate(rows[0]["held_out"]):
        baseline, gamma, at = first["alpha"], first["gamma"], f"T={first['temperature']:g}"
        columns[f"alpha, {at}"] = lambda row, i=i, baseline=baseline: _alpha(
            row["held_out"][i]["alpha"], baseline
        )
        columns[f"expected tokens, gamma {gamma}, {at}"] = lambda row, i=i, gamma=gamma: (
            f"{formulas.expected_tokens(row['held_out'][i]['alpha']['value'], gamma):.2f}"
        )
    return results.table(columns, rows)


def _alpha(alpha: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    text = f"{alpha['value']:.3f}"
    if alpha["low"] is None:
        return text
    if baseline["high"] is not None and alpha["low"] > baseline["high"]:
        text = f"**{text}**"
    return f"{text} ({alpha['low']:.3f}–{alpha['high']:.3f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all recipes, prints a table, and writes JSON if asked to."""
    parser = command.parser("objectives", __doc__)
    add = parser.add_argument
    add("--data_dir", required=True, metavar="DIR", help="folder of the texts, DATA_DIR above")
    add("--output_dir", required=True, type=Path, metavar="DIR", help="folder of the trainings")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    args = parser.parse_args(arguments)
    settings = {**SETTINGS, "DATA_DIR": args.data_dir}
    rows = []
    for recipe in RECIPES:
        rows.append(measure(recipe, settings, args.output_dir))
        if args.json:
            results.write_json(args.json, {"machine": machine(), "options": SETTINGS, "rows": rows})
    results.show(table(rows))


if __name__ == "__main__":
    main()
