"""Program of ``test_layout.py``: distills for a target, and starts from a checkpoint, on one of 2
simulated devices and on both; prints as JSON how what is loaded is sharded, and the results."""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from spec_t5x.checkpoints.loading import load
from spec_t5x.labs.training import run_distill, run_train
from tests.labs.training.test_run_distill import BINDINGS, OF_SIZES, PAIRS
from tests.labs.training.toys import run_command

KERNEL = "decoder/layers_0/mlp/wo/kernel"
RECIPES = {
    "shared": {"ON_POLICY": 0.5, "DRAFT_VOCAB_SIZE": 10},
    "eagle": {"DECODER_LAYERS": "last:1", "UNROLLED_STEPS": 2, "OUTPUTS": "references"},
    "checkpoint": {**OF_SIZES, "OUTPUTS": "references"},
}


def distill(pair: Path, folder: Path, recipe: str, **bindings) -> dict:
    """Runs the command; returns the sharding of each model that is loaded, and the results."""
    loaded = []

    def noted(*args, **options):
        found = load(*args, **options)
        sharding = flatten_dict(found.params, sep="/")[KERNEL].sharding
        loaded.append([sharding.num_devices, list(getattr(sharding, "spec", ()))])
        return found

    run_distill.load = run_train.load = noted
    if recipe == "checkpoint":
        sizes = load(pair / "draft").config.to_dict()
        bindings |= {f"T5Config__{name}": value for name, value in sizes.items()}
        bindings["distill__initial_checkpoint"] = str(pair / "draft")
    paths = {"CHECKPOINT_PATH": str(pair / "target"), "DATA_DIR": str(folder.parent)}
    given = paths | {"OUTPUT_DIR": str(folder)} | BINDINGS | RECIPES[recipe] | bindings
    with contextlib.redirect_stdout(sys.stderr):
        status = run_command("distill", "distill_draft", **given)
    written = sorted((folder / "cache").rglob("*.npz"))
    lines = map(json.loads, (folder / "metrics.jsonl").open())
    return {
        "status": status,
        "loaded": loaded,
        "texts": [np.load(path)["ids"].tolist() for path in written],
        "losses": [line["loss"] for line in lines if "loss" in line],
    }


def main(pair: Path, folder: Path) -> dict:
    for name, pairs in {"train": PAIRS * 4, "dev": PAIRS}.items():
        (folder / f"{name}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in pairs))
    alone = {"TrainOptions__data_parallel": 1, "TrainOptions__log_period": 1}
    mesh = alone | {"TrainOptions__model_parallel": 2}
    return {
        recipe: [
            distill(pair, folder / f"{recipe}{n}", recipe, **each)
            for n, each in enumerate((alone, mesh))
        ]
        for recipe in RECIPES
    }


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(main(Path(sys.argv[1]), Path(folder))))
