"""Helpers that write, damage and compare checkpoints."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2

from spec_t5x.checkpoints.t5x.writing import step_of, write_model
from spec_t5x.errors import InputError
from spec_t5x.labs.training.exports import model_in_memory


def message_of(function, *args, **kwargs) -> str:
    """Returns the message of the ``InputError`` that a call must raise, checked to be one line."""
    with pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(directory, *remove, **changes):
    """Removes the keys ``remove`` from ``directory/config.json`` and sets those in ``changes``."""
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in remove}))


def save_t5x(directory, params, config, vocabulary=None, *, dtype="float32"):
    """Saves parameters as a checkpoint in T5X's legacy format."""
    step = {"step": step_of(Path(directory))}
    stored = model_in_memory(directory, params, config, vocabulary, step)
    stored.write(directory, write_model, dtype=dtype)


def with_sentinels(spiece: Path, path: Path, number: int) -> Path:
    """Writes ``spiece`` with ``number`` sentinels, as in mT5's file; returns ``path``."""
    model = sentencepiece_model_pb2.ModelProto.FromString(spiece.read_bytes())
    kind = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
    for each in reversed(range(number)):
        model.pieces.add(piece=f"\u2581<extra_id_{each}>", score=0.0, type=kind)
    path.write_bytes(model.SerializeToString())
    return path


def assert_trees_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def check_params(params, config, source):
    """Checks names, shapes and values of parameters as loading does."""
    stored = model_in_memory(source, params, config, None)
    stored.read_params(dtype="float32")
