"""Compares variants of an EAGLE head after equal training, and packaged drafts.

    python -m benchmarks.eagle_heads --data_dir data/ende --output_dir runs/heads \\
        --json benchmarks/eagle_heads.json

DATA_DIR holds train.tsv.gz and dev.tsv.gz (tag, English, German). Each draft is trained for the
packaged T5, as a translator, by a run of ``spec-t5x`` in a separate folder, all with the same
settings; the same command resumes runs that were interrupted. ``spec-t5x acceptance`` then measures
these drafts and the packaged ones.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import command, objectives
from spec_t5x.cli.main import main as spec_t5x
from spec_t5x.data.task_options import TRANSLATE_PREFIX
from spec_t5x.labs.benchmark import results

TARGET, STEPS = "t5-target", 200
SETTINGS = {
    "DataOptions.source_prefix": TRANSLATE_PREFIX,
    "DataOptions.source_column": 1,
    "DataOptions.target_column": 2,
    "DataOptions.num_columns": 3,
    "DataOptions.max_source_length": 32,
    "DataOptions.truncate_sources": False,
    "DataOptions.max_target_length": 32,
    "DataOptions.buckets": (16, 32),
    "DataOptions.tokens_per_batch": 1024,
    "OptimizerOptions.name": "adamw",
    "OptimizerOptions.learning_rate": 3e-3,
    "OptimizerOptions.warmup_steps": 30,
    "OptimizerOptions.decay": "constant",
    "OptimizerOptions.cooldown_steps": 80,
    "TrainOptions.steps": STEPS,
    "TrainOptions.objective": "jeffreys",
    "TrainOptions.eval_period": 0,
    "TrainOptions.tensorboard": False,
}
# Bindings by which each variant differs from gin_configs/runs/distill_t5_eagle.gin.
VARIANTS = {
    "head": {},
    "head, of the last states alone": {"HEAD_DEPTHS": ()},
    "head, no attention to the source": {"KeptLayers.reads_source": False},
    "head, one step, not unrolled": {"UNROLLED_STEPS": 1},
    "head, 3000 tokens in the output layer": {"DRAFT_VOCAB_SIZE": 3000},
    "the target's last layer, without its states": {
        "UNROLLED_STEPS": 0,
        "HEAD_WIDTH": None,
        "HEAD_DEPTHS": (),
    },
}
# Packaged drafts and drafts without training: values of ``--draft`` by name in the table.
AT_BEST = {
    "t5-eagle": "eagle",
    "t5-draft": "transformer",
    "int8": "int8",
    "int4": "int4",
    "copy": "copy",
}
MEASURED = ("--temperature", "0", "--temperature", "1", "--gamma", "4", "--num_tokens", "5000")


def trained(data_dir: str, output_dir: Path) -> dict[str, str]:
    """Trains all variants; returns the values of ``--draft`` by name."""
    drafts: dict[str, str] = {}

    def train(name: str, gin_file: str, result: str, command: str, changes: dict[str, Any]) -> None:
        folder = output_dir / str(len(drafts))
        bindings = {**SETTINGS, "DATA_DIR": data_dir, **changes}
        objectives.train(gin_file, folder, bindings, command)
        drafts[name] = result.format(folder)

    distilled = {
        "distill.cache_dir": str(output_dir),
        "CHECKPOINT_PATH": TARGET,
        # All ids: the packaged head's smaller output layer is a separate variant here.
        "DRAFT_VOCAB_SIZE": None,
    }
    for name, changes in VARIANTS.items():
        train(name, "distill_t5_eagle", "{}/draft", "distill", distilled | changes)
    train("transformer, as t5-draft", "distill_t5_draft", "{}/draft", "distill", distilled)
    heads = "train_t5_heads", "medusa:{}/heads", "train-heads"
    train("Medusa heads", *heads, {"TARGET": TARGET})
    return drafts


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and measures all drafts, and writes the figures as JSON."""
    parser = command.parser("eagle_heads", __doc__)
    add = parser.add_argument
    add("--data_dir", required=True, metavar="DIR", help="folder of the texts, DATA_DIR above")
    add("--output_dir", required=True, type=Path, metavar="DIR", help="folder of the trainings")
    add("--json", required=True, type=Path, metavar="FILE", help="file for all figures")
    args = parser.parse_args(arguments)
    drafts = trained(args.data_dir, args.output_dir) | AT_BEST
    flags = [flag for draft in drafts.values() for flag in ("--draft", draft)]
    data = ["--data", f"{args.data_dir}/dev.tsv.gz", "--source_column", "1", "--num_columns", "3"]
    data += ["--prefix", TRANSLATE_PREFIX]
    given = ["--target", TARGET, *flags, *MEASURED, *data, "--json", str(args.json)]
    status = spec_t5x(["acceptance", *given])
    if status:
        sys.exit(status)
    found = json.loads(args.json.read_text(encoding="utf-8"))
    # Rows of one temperature after the other, each in the order of the drafts.
    for row, name in zip(found["rows"], 2 * list(drafts), strict=True):
        row["draft"] = name
    results.write_json(args.json, found | {"options": found["options"] | {"trained": SETTINGS}})


if __name__ == "__main__":
    main()
