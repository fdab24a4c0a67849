"""T5X's programs in two processes that share their devices, as the hosts of a TPU pod do."""

import json

import pytest

pytest.importorskip("t5x.infer", reason="needs T5X")

from spec_t5x.checkpoints.loading import load
from tests.t5x_plugin.launches import BY_NAME, INFER, STOCK_INFER, TRAINING, WITH_SCORES

# The models of a launch are sharded over all four devices.
SHARED = {"processes": 2, "devices": 2, "partitioning.PjitPartitioner.num_partitions": 4}


def texts(lines: list[dict]) -> list[str]:
    return [line["prediction"] for line in lines]


def test_a_draft_model_is_sharded_over_the_processes(launches):
    found = launches.infer(
        ["model_0.0.gin", INFER, "draft.gin"],
        target="target_orbax",
        DRAFT_CHECKPOINT_PATH=launches.checkpoint("draft_orbax"),
        GAMMA=3,
        **SHARED,
    )
    assert texts(found) == texts(launches.stock(0.0))
    assert sum(line["aux"]["accepted"] for line in found) > 0


def test_samples_are_those_of_stock_t5x(launches):
    """T5X places the inputs by process, so that other rows draw than in one process."""
    model = "model_1.0.gin"
    stock = launches.infer([model, STOCK_INFER], **WITH_SCORES, **SHARED)
    found = launches.infer(
        [model, INFER, "draft.gin"],
        DRAFT_CHECKPOINT_PATH=launches.checkpoint("draft_legacy"),
        VERIFIER="coupled",
        **SHARED,
    )
    assert texts(found) == texts(stock)
    assert len(set(texts(found))) > 1


@pytest.mark.parametrize("trained", ["draft", "head"])
def test_a_draft_is_distilled_in_two_processes_and_used_in_both(launches, trained):
    """Each holds a part of the draft, of its optimizer's state and of the frozen target."""
    directory = launches.directory / f"shared_{trained}"
    runs = {
        "draft": ("small_model.gin", "t5x_distill"),
        "head": ("model_0.0.gin", "t5x_distill_head"),
    }
    macros = {"TARGET_DTYPE": "float32", "WARMUP_STEPS": 1, "MODEL_DIR": str(directory)}
    macros |= TRAINING
    if trained == "head":
        macros |= {"DRAFT_DIR": str(directory / "draft"), "HEAD_WIDTH": 16, "HEAD_DEPTHS": (0,)}
    model, run = runs[trained]
    target = launches.checkpoint("target_orbax")
    files = [model, f"gin_configs/runs/{run}.gin"]
    launches.train(files, CHECKPOINT_PATH=target, TRAIN_STEPS=2, **macros, **SHARED)
    if trained == "draft":
        # The package reads what two processes wrote.
        assert load(directory, vocabulary=f"{launches.vocabulary}:0").config.emb_dim == 16
        used = {"files": ["draft.gin"], "DRAFT_CHECKPOINT_PATH": str(directory)}
    else:
        config = json.loads((directory / "draft" / "config.json").read_text())
        assert config["step"] == 2
        used = {"files": [BY_NAME], "DRAFT_NAME": f"eagle:{directory / 'draft'}"}
    found = launches.infer(["model_0.0.gin", INFER, *used.pop("files")], **used, **SHARED)
    assert texts(found) == texts(launches.stock(0.0))
    assert sum(line["aux"]["proposed"] for line in found) > 0
