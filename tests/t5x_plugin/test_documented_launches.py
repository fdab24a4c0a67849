"""Launches of real T5X as its documents and ours write them, against stock T5X."""

import dataclasses
import functools
import re
import shlex
import subprocess

import pytest

pytest.importorskip("t5x.infer", reason="needs T5X")

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.checkpoints.loading import load
from spec_t5x.models.t5 import T5Config, Transformer
from tests.checkpoints.faults import save_t5x
from tests.t5x_plugin.launches import (
    BY_NAME,
    INFER,
    MODEL_GIN,
    STOCK_INFER,
    WITH_SCORES,
    finished,
    predictions,
)
from tests.t5x_plugin.toy_models import REPOSITORY


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    """Compares texts, one or several for each input, and scores."""
    assert len(ours) == len(theirs) == 5
    for found, expected in zip(ours, theirs, strict=True):
        assert found["inputs"] == expected["inputs"]
        assert found["prediction"] == expected["prediction"]
        np.testing.assert_allclose(found["aux"]["scores"], expected["aux"]["scores"], atol=1e-3)
    assert len({str(line["prediction"]) for line in ours}) > 1


# --- gin's bindings of methods -----------------------------------------------

BOUND = """
from __gin__ import dynamic_registration
from {package} import {module}
{module}.{name}.predict_batch_with_aux:
"""
BINDINGS = [
    "  num_decodes = 2\n",
    "  return_all_decodes = True\n  prompt_with_targets = True\n",
]
STOCK = {"package": "t5x", "module": "models", "name": "EncoderDecoderModel"}
OURS = {
    "package": "spec_t5x.t5x_plugin",
    "module": "speculative_model",
    "name": "SpeculativeEncoderDecoderModel",
}
OWN = {"package": "tests.t5x_plugin", "module": "toy_models", "name": "OwnMetrics"}
# A user's class has to be named in place of T5X's, which speculate.gin takes.
OWN_MODEL = """
from __gin__ import dynamic_registration
from spec_t5x.t5x_plugin import speculation
from tests.t5x_plugin import toy_models
speculation.speculate.model = @toy_models.OwnMetrics()
"""


@pytest.fixture(scope="module")
def bound(launches):
    """Provides a writer of gin files, and stock T5X's predictions with all bindings."""
    own = MODEL_GIN.format(vocabulary=launches.vocabulary, temperature=1.0)
    own = own.replace("models.EncoderDecoderModel", "toy_models.OwnMetrics")
    own = own.replace("from t5x import models", "from tests.t5x_plugin import toy_models")
    files = {
        "all_of_stock": BOUND.format(**STOCK) + "".join(BINDINGS),
        "all_of_own": BOUND.format(**OWN) + "".join(BINDINGS),
        "some_of_stock": BOUND.format(**STOCK) + BINDINGS[0],
        "others_of_ours": BOUND.format(**OURS) + BINDINGS[1],
        "own": own,
        "own_model": OWN_MODEL,
    }
    for name, text in files.items():
        (launches.directory / f"{name}.gin").write_text(text)
    found = launches.infer(["model_1.0.gin", STOCK_INFER, "all_of_stock.gin"], **WITH_SCORES)
    assert all(len(line["prediction"]) == len(line["aux"]["scores"]) == 2 for line in found)
    return found


@pytest.mark.parametrize(
    "files",
    [
        ["model_1.0.gin", "some_of_stock.gin", "others_of_ours.gin", INFER, "draft.gin"],
        ["own.gin", "all_of_own.gin", INFER, "draft.gin", "own_model.gin"],
    ],
    ids=["stock and ours", "a user's"],
)
def test_bindings_of_methods(launches, bound, files):
    draft = launches.checkpoint("draft_legacy")
    found = launches.infer(files, DRAFT_CHECKPOINT_PATH=draft, VERIFIER="coupled", GAMMA=3)
    assert_same(found, bound)
    # The targets are forced.
    assert all(any(text for text in line["prediction"]) for line in found)


# --- a draft whose heads the mesh does not divide ----------------------------


def test_heads_that_the_mesh_does_not_divide(launches, tiny_pair):
    """The target has 4 heads and the draft 6, on 4 devices."""
    loaded, directory = load(tiny_pair / "target"), launches.directory
    config = dataclasses.replace(loaded.config, num_heads=4, head_dim=4)
    params = jax.tree.map_with_path(
        lambda path, leaf: jnp.tile(leaf, (2, 1)) if "rel_embedding" in str(path) else leaf,
        loaded.params,
    )
    save_t5x(directory / "target_4" / "checkpoint_7", params, config)
    odd = dataclasses.replace(load(tiny_pair / "draft").config, num_heads=6, mlp_dim=50)
    save_t5x(directory / "draft_6" / "checkpoint_7", random(odd), odd)
    macros = {
        "target": "target_4",
        "network.T5Config.num_heads": 4,
        "network.T5Config.head_dim": 4,
    }
    expected = launches.infer(["model_0.0.gin", STOCK_INFER], **macros, **WITH_SCORES)
    found = launches.infer(
        ["model_0.0.gin", INFER, "gin_configs/t5x/draft_of_sizes.gin"],
        devices=4,
        DRAFT_CHECKPOINT_PATH=launches.checkpoint("draft_6"),
        DRAFT_VOCAB_SIZE=128,
        DRAFT_EMB_DIM=16,
        DRAFT_MLP_DIM=50,
        DRAFT_NUM_HEADS=6,
        DRAFT_HEAD_DIM=8,
        DRAFT_NUM_ENCODER_LAYERS=1,
        DRAFT_NUM_DECODER_LAYERS=1,
        DRAFT_DTYPE="float32",
        **macros,
        **{"partitioning.PjitPartitioner.num_partitions": 4},
    )
    assert_same(found, expected)
    # Biases of both stacks; three matrices of each feed-forward layer.
    (line,) = re.findall(r"The mesh .*does not divide.*", launches.log)
    assert "'model': 4} does not divide 8 of the draft's 29 parameters" in line


def random(config: T5Config):
    tokens = jnp.ones((1, 1), jnp.int32)
    init = functools.partial(Transformer(config).init, enable_dropout=False)
    return init(jax.random.key(0), tokens, tokens, tokens)["params"]


# --- the commands of the documents -------------------------------------------


def documented(name: str) -> list[list[str]]:
    """Returns a document's commands that infer with T5X, as a shell splits them."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    lines = [line for line in blocks.splitlines() if line.startswith("python -m t5x.infer ")]
    return [shlex.split(line) for line in lines]


COMMANDS = documented("docs/t5x.md")
# Parts of the words that make a launch speculative.
OF_SPECULATION = ("speculate.gin", "draft_by_name.gin", "DRAFT_", "GAMMA")
# 11B at the size of the tests' pair, which is a T5 1.1.
SMALL = {
    "network.T5Config.vocab_size": 128,
    "network.T5Config.emb_dim": 32,
    "network.T5Config.num_heads": 2,
    "network.T5Config.num_encoder_layers": 2,
    "network.T5Config.num_decoder_layers": 2,
    "network.T5Config.head_dim": 8,
    "network.T5Config.mlp_dim": 48,
    "network.T5Config.mlp_activations": ("gelu", "linear"),
    "network.T5Config.logits_via_embedding": False,
    "network.T5Config.dtype": "float32",
    "seqio.SentencePieceVocabulary.extra_ids": 0,
    "DROPOUT_RATE": 0.0,
}


def small(launches, words: list[str], output: str):
    """Returns a document's whole command with flags of the pair's checkpoints, sizes and task.

    Of a flag that is given twice, the last counts.
    """
    (launches.directory / "my_infer.gin").write_text(f'include "{STOCK_INFER}"\n')
    files = [word.removeprefix("--gin_file=") for word in words if word.startswith("--gin_file=")]
    files = [launches.directory.joinpath(file).name if "/" not in file else file for file in files]
    macros = {
        **SMALL,
        **WITH_SCORES,
        "seqio.SentencePieceVocabulary.sentencepiece_model_file": str(launches.vocabulary),
        "CHECKPOINT_PATH": launches.checkpoint("target_legacy"),
        "INFER_OUTPUT_DIR": str(launches.directory / output),
        "utils.DatasetConfig.batch_size": 8,
    }
    if any("DRAFT_CHECKPOINT_PATH" in word for word in words):
        files.append("draft.gin")
        macros |= {
            "DRAFT_CHECKPOINT_PATH": launches.checkpoint("draft_legacy"),
            "t5.T5Config.dtype": "float32",
        }
    arguments, options = launches.command("infer", files, **macros)
    flags = [word for word in words if word.startswith("--gin.")]
    return [*arguments[:3], *flags, *arguments[3:]], options


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[-1].partition("=")[0][6:])
def test_commands_of_the_document(launches, words):
    number = COMMANDS.index(words)
    log = finished(*small(launches, words, f"ours_{number}"))
    assert "Decoding speculatively: " in log
    of_stock = [word for word in words if not any(name in word for name in OF_SPECULATION)]
    finished(*small(launches, of_stock, f"stock_{number}"))
    found, expected = (
        predictions(launches.directory / f"{of}_{number}") for of in ("ours", "stock")
    )
    assert_same(found, expected)
    assert all(line["aux"]["target_calls"] > 0 for line in found)


def test_the_readmes_command_is_the_documents():
    assert documented("README.md") == COMMANDS[:1]
    # A model in T5X's default search, a name, and beams.
    assert len(COMMANDS) == 3


@pytest.mark.parametrize(
    ("program", "files", "macros", "message"),
    [
        # Draws on the latest check: the draft's name comes before the file that overrides it.
        (
            "infer",
            [BY_NAME, INFER],
            # As many ids as DRAFT_SIZE, whose model is the draft here.
            {"DRAFT_NAME": "copy", "network.T5Config.vocab_size": 32128},
            "set it or, for a draft by name, give draft_by_name.gin after speculate.gin",
        ),
        (
            "infer",
            [INFER, "draft.gin"],
            {"infer.use_orbax": False},
            "use_orbax is False, which restores no draft: leave use_orbax out",
        ),
        (
            "train",
            ["t5x/configs/runs/finetune.gin", "gin_configs/t5x/speculate.gin"],
            {"INITIAL_CHECKPOINT_PATH": [], "TRAIN_STEPS": 2, "DROPOUT_RATE": 0.0},
            "leave it out of t5x.train",
        ),
    ],
    ids=["order of files", "use_orbax", "train"],
)
def test_mistakes_are_found_before_anything_is_restored(launches, program, files, macros, message):
    arguments, options = launches.command(
        program,
        ["model_0.0.gin", *files],
        CHECKPOINT_PATH=launches.checkpoint("target_legacy"),
        **{name: str(launches.directory / "never") for name in ("INFER_OUTPUT_DIR", "MODEL_DIR")},
        **macros,
        **{"utils.DatasetConfig.batch_size": 8},
    )
    done = subprocess.run(arguments, **options, capture_output=True)
    assert done.returncode
    (line,) = [line for line in done.stderr.splitlines() if "InputError: " in line]
    assert message in line
    assert "Restoring" not in done.stderr
