"""Launches of real T5X as its documents and ours write them: what stock T5X writes, to the byte."""

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
from tests.t5x_plugin.test_launches import (
    MODEL_GIN,
    MODEL_PARALLEL,
    Launches,
    launches,
    predictions,
)
from tests.t5x_plugin.toy_models import REPOSITORY

__all__ = ["launches"]

INFER = "gin_configs/runs/t5x_infer.gin"
STOCK_INFER = "t5x/configs/runs/infer.gin"
WITH_SCORES = {"infer.mode": "predict_with_aux"}


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    """The same texts, one or several of an input, and scores."""
    assert len(ours) == len(theirs) == 5
    for found, expected in zip(ours, theirs, strict=True):
        assert found["inputs"] == expected["inputs"]
        assert found["prediction"] == expected["prediction"]
        np.testing.assert_allclose(found["aux"]["scores"], expected["aux"]["scores"], atol=1e-3)
    assert len({str(line["prediction"]) for line in ours}) > 1


# --- what gin binds to methods -----------------------------------------------

BOUND = """
from __gin__ import dynamic_registration
from {package} import {module}
{module}.{name}.predict_batch_with_aux:
  num_decodes = 2
  return_all_decodes = True
  prompt_with_targets = True
"""
OF_CLASSES = {
    "stock": ("t5x", "models", "EncoderDecoderModel"),
    "ours": ("spec_t5x.t5x_plugin", "speculative_model", "SpeculativeEncoderDecoderModel"),
    "own": ("tests.t5x_plugin", "toy_models", "OwnMetrics"),
}
# A user's class has to be named where speculate.gin takes T5X's.
OWN_MODEL = """
from __gin__ import dynamic_registration
from spec_t5x.t5x_plugin import speculation
from tests.t5x_plugin import toy_models
speculation.speculate.model = @toy_models.OwnMetrics()
"""


@pytest.fixture(scope="module")
def bound(launches):
    """Gin files of the bindings, and what stock T5X writes with them."""
    for kind, (package, module, name) in OF_CLASSES.items():
        text = BOUND.format(package=package, module=module, name=name)
        (launches.directory / f"bound_{kind}.gin").write_text(text)
    text = MODEL_GIN.format(vocabulary=launches.vocabulary, temperature=1.0)
    text = text.replace("models.EncoderDecoderModel", "toy_models.OwnMetrics")
    text = text.replace("from t5x import models", "from tests.t5x_plugin import toy_models")
    (launches.directory / "own.gin").write_text(text)
    (launches.directory / "own_model.gin").write_text(OWN_MODEL)
    files = ["model_1.0.gin", STOCK_INFER, "bound_stock.gin"]
    options = {"CHECKPOINT_PATH": launches.checkpoint("target_legacy"), **WITH_SCORES}
    found = predictions(launches.run("infer", files, **options))
    assert all(len(line["prediction"]) == len(line["aux"]["scores"]) == 2 for line in found)
    return found


@pytest.mark.parametrize("kind", OF_CLASSES)
def test_bindings_of_methods(launches, bound, kind):
    files = ["model_1.0.gin", "bound_" + kind + ".gin", INFER, "draft.gin"]
    if kind == "own":
        files = ["own.gin", "bound_own.gin", INFER, "draft.gin", "own_model.gin"]
    output = launches.run(
        "infer",
        files,
        CHECKPOINT_PATH=launches.checkpoint("target_legacy"),
        DRAFT_CHECKPOINT_PATH=launches.checkpoint("draft_legacy"),
        VERIFIER="coupled",
        GAMMA=3,
    )
    found = predictions(output)
    assert_same(found, bound)
    # The targets are forced.
    assert all(any(text for text in line["prediction"]) for line in found)


# --- a draft whose heads the mesh does not divide ----------------------------

ON_4 = {
    "num_partitions": {"partitioning.PjitPartitioner.num_partitions": 4},
    "submesh": {
        **MODEL_PARALLEL,
        "partitioning.PjitPartitioner.model_parallel_submesh": (1, 1, 1, 4),
    },
}


@pytest.fixture(scope="module")
def of_4_heads(launches, tiny_pair):
    """A target of 4 heads, drafts of 2 and 6, and what stock T5X writes with it."""
    loaded = load(tiny_pair / "target")
    config = dataclasses.replace(loaded.config, num_heads=4, head_dim=4)
    params = jax.tree.map_with_path(
        lambda path, leaf: jnp.tile(leaf, (2, 1)) if "rel_embedding" in str(path) else leaf,
        loaded.params,
    )
    save_t5x(launches.directory / "target_4" / "checkpoint_7", params, config)
    draft = load(tiny_pair / "draft").config
    odd = dataclasses.replace(draft, num_heads=6, mlp_dim=50)
    for name, sizes in {"2": draft, "6": odd}.items():
        save_t5x(launches.directory / f"draft_{name}" / "checkpoint_7", random(sizes), sizes)
    macros = {
        "CHECKPOINT_PATH": launches.checkpoint("target_4"),
        "network.T5Config.num_heads": 4,
        "network.T5Config.head_dim": 4,
    }
    files = ["model_0.0.gin", STOCK_INFER]
    return macros, predictions(launches.run("infer", files, **macros, **WITH_SCORES))


def random(config: T5Config):
    tokens = jnp.ones((1, 1), jnp.int32)
    init = functools.partial(Transformer(config).init, enable_dropout=False)
    return init(jax.random.key(0), tokens, tokens, tokens)["params"]


@pytest.mark.parametrize(("heads", "partitions"), [(6, "num_partitions"), (2, "submesh")])
def test_heads_that_the_mesh_does_not_divide(launches, of_4_heads, heads, partitions):
    macros, expected = of_4_heads
    output = launches.run(
        "infer",
        ["model_0.0.gin", INFER, "gin_configs/t5x/draft_of_sizes.gin"],
        devices=4,
        DRAFT_CHECKPOINT_PATH=launches.checkpoint(f"draft_{heads}"),
        DRAFT_VOCAB_SIZE=128,
        DRAFT_EMB_DIM=16,
        DRAFT_MLP_DIM=50 if heads == 6 else 48,
        DRAFT_NUM_HEADS=heads,
        DRAFT_HEAD_DIM=8,
        DRAFT_NUM_ENCODER_LAYERS=1,
        DRAFT_NUM_DECODER_LAYERS=1,
        DRAFT_DTYPE="float32",
        **macros,
        **ON_4[partitions],
    )
    assert_same(predictions(output), expected)
    # Biases of both stacks; three matrices of each feed-forward layer.
    number = 8 if heads == 6 else 2
    (line,) = re.findall(r"The mesh .*does not divide.*", launches.log)
    assert f"'model': 4}} does not divide {number} of the draft's 29 parameters" in line
    assert "KB more than its share" in line


# --- the commands of the documents -------------------------------------------


def documented(name: str) -> list[list[str]]:
    """The commands of a document that infer with T5X, as a shell splits them."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    lines = [line for line in blocks.splitlines() if line.startswith("python -m t5x.infer ")]
    return [shlex.split(line) for line in lines]


COMMANDS = documented("docs/t5x.md")
# What makes a launch speculative.
OF_SPECULATION = ("speculate.gin", "draft_by_name.gin", "DRAFT_", "GAMMA")
# XXL at the size of the tests' pair.
SMALL = {
    "network.T5Config.vocab_size": 128,
    "network.T5Config.emb_dim": 32,
    "network.T5Config.num_heads": 2,
    "network.T5Config.num_encoder_layers": 2,
    "network.T5Config.num_decoder_layers": 2,
    "network.T5Config.head_dim": 8,
    "network.T5Config.mlp_dim": 48,
    "network.T5Config.dtype": "float32",
    "seqio.SentencePieceVocabulary.extra_ids": 0,
    "DROPOUT_RATE": 0.0,
}


def small(launches: Launches, words: list[str], output: str):
    """A document's command, all of it, and flags of the pair's checkpoints, sizes and task.

    A flag that is given twice counts as it is given last.
    """
    is_model = any("DRAFT_CHECKPOINT_PATH" in word for word in words)
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
    if is_model:
        files.append("draft.gin")
        macros |= {
            "DRAFT_CHECKPOINT_PATH": launches.checkpoint("draft_legacy"),
            "t5.T5Config.dtype": "float32",
        }
    arguments, options = launches.command("infer", files, **macros)
    flags = [word for word in words if word.startswith("--gin.")]
    return [*arguments[:3], *flags, *arguments[3:]], options


def run(arguments, options) -> str:
    done = subprocess.run(arguments, **options, capture_output=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[-1].partition("=")[0][6:])
def test_commands_of_the_document(launches, words):
    number = COMMANDS.index(words)
    log = run(*small(launches, words, f"ours_{number}"))
    assert "Decoding speculatively: " in log
    of_stock = [word for word in words if not any(name in word for name in OF_SPECULATION)]
    run(*small(launches, of_stock, f"stock_{number}"))
    found, expected = (
        predictions(launches.directory / f"{of}_{number}") for of in ("ours", "stock")
    )
    assert_same(found, expected)
    assert all(line["aux"]["target_calls"] > 0 for line in found)


def test_the_readmes_command_is_the_documents():
    assert documented("README.md") == COMMANDS[:1]
    # A model in T5X's default search, a name, and beams.
    assert len(COMMANDS) == 3


MISTAKES = {
    "a search without a model": (
        ["model", INFER, "gin_configs/t5x/beams.gin", "gin_configs/t5x/draft_by_name.gin"],
        {"DRAFT_NAME": "copy"},
        "decode_fn is beam_search and draft 'copy' cannot search: add --gin_file=gin_configs/t5x/g",
    ),
    "the model last": (
        [INFER, "model"],
        {"GAMMA": "auto"},
        "MODEL is a EncoderDecoderModel without a draft: give speculate.gin, or the run's file",
    ),
    "the draft's name first": (
        ["model", "gin_configs/t5x/draft_by_name.gin", INFER],
        # As many ids as DRAFT_SIZE has, which counts here.
        {"DRAFT_NAME": "copy", "network.T5Config.vocab_size": 32128},
        "set it or, for a draft by name, give draft_by_name.gin after speculate.gin and after",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found_before_anything_is_restored(launches, name):
    files, macros, message = MISTAKES[name]
    files = ["model_0.0.gin" if file == "model" else file for file in files]
    macros = {
        "CHECKPOINT_PATH": launches.checkpoint("target_legacy"),
        "INFER_OUTPUT_DIR": str(launches.directory / "never"),
        "utils.DatasetConfig.batch_size": 8,
        **macros,
    }
    arguments, options = launches.command("infer", files, **macros)
    done = subprocess.run(arguments, **options, capture_output=True)
    assert done.returncode
    (line,) = [line for line in done.stderr.splitlines() if "InputError: " in line]
    assert message in line
    assert "Restoring" not in done.stderr
