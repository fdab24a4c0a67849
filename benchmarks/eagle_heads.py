"""What each part of an EAGLE head is worth: alpha and tokens a call after equal steps.

    python -m benchmarks.eagle_heads --data_dir data/ende --output_dir runs/heads \\
        --json benchmarks/eagle_heads.json

DATA_DIR holds train.tsv.gz and dev.tsv.gz (tag, English, German). Each variant is a run of
``spec-t5x distill`` for the packaged English-German target in a folder of its own; the same
command resumes runs that were interrupted. All are then measured by ``spec-t5x acceptance``.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import objectives
from spec_t5x.cli.main import main as spec_t5x
from spec_t5x.experiments import results

SETTINGS = {
    "TRAIN_STEPS": 200,
    "DataOptions.max_source_length": 32,
    "DataOptions.max_target_length": 32,
    "DataOptions.buckets": (16, 32),
    "OptimizerOptions.warmup_steps": 30,
    "OptimizerOptions.cooldown_steps": 80,
    "TrainOptions.eval_period": 0,
}
# What is changed of gin_configs/runs/distill_ende_eagle.gin.
VARIANTS = {
    "as packaged": {},
    "the last states alone": {"HEAD_DEPTHS": ()},
    "no attention to the source": {"KeptLayers.reads_source": False},
    "one step, not unrolled": {"UNROLLED_STEPS": 1},
    "3000 tokens in the output layer": {"DRAFT_VOCAB_SIZE": 3000},
}
MEASURED = ("--temperature", "0", "--temperature", "1", "--gamma", "4", "--num_tokens", "5000")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and measures all variants, and keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(arguments)
    settings = {**SETTINGS, "DATA_DIR": args.data_dir, "distill.cache_dir": str(args.output_dir)}
    drafts = []
    for number, changes in enumerate(VARIANTS.values()):
        folder = args.output_dir / str(number)
        objectives.train("distill_ende_eagle", folder, settings | changes)
        drafts += ["--draft", f"eagle:{folder / 'draft'}"]
    data = ["--data", f"{args.data_dir}/dev.tsv.gz", "--source_column", "1", "--num_columns", "3"]
    given = ["--target", "ende-target", *drafts, *MEASURED, *data, "--json", str(args.json)]
    status = spec_t5x(["acceptance", *given])
    if status:
        sys.exit(status)
    found = json.loads(args.json.read_text(encoding="utf-8"))
    # Rows of each temperature, in the order of the drafts.
    for i, row in enumerate(found["rows"]):
        row["draft"] = list(VARIANTS)[i % len(VARIANTS)]
    results.write_json(args.json, found | {"options": found["options"] | {"trained": SETTINGS}})


if __name__ == "__main__":
    main()
