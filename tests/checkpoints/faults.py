"""Checkpoints that are damaged, and what is said of them."""

import json

import pytest

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
