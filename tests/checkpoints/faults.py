"""Checkpoints that are written or damaged, and what is said of them."""

import json
from pathlib import Path

import pytest

from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.t5x.writing import step_of, write_model
from spec_t5x.errors import InputError


def message_of(function, *args, **kwargs) -> str:
    """The one line that a call is refused with."""
    with pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(directory, *remove, **changes):
    """Changes entries of config.json and removes others."""
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in remove}))


def save_t5x(directory, params, config, vocabulary=None, *, dtype="float32"):
    """A checkpoint of T5X's legacy format, of parameters in memory."""
    step = {"step": step_of(Path(directory))}
    stored = StoredModel.of_params(directory, params, config, vocabulary, step)
    stored.write(directory, write_model, dtype=dtype)


def check_params(params, config, source):
    """Names, shapes and values of parameters in memory."""
    stored = StoredModel.of_params(source, params, config, None)
    stored.read_params(dtype="float32")
