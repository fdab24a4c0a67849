"""Paths as users write them."""

import os
from pathlib import Path

from spec_t5x.errors import as_input_error


def expanded(path: str | Path) -> Path:
    """Returns a path with the home directory for ``~``; raises ``InputError`` if there is none."""
    with as_input_error(f"{path} names no home directory", "give the whole path", RuntimeError):
        # ``~name`` may be a file's name, too.
        return Path(path) if os.path.isfile(path) else Path(path).expanduser()
