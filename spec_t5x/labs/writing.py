"""Errors of writing files, reported in one line."""

import contextlib
from pathlib import Path

from spec_t5x.errors import as_input_error


def reported(
    path: Path, remedy: str = "free some space and run the same command again to resume"
) -> contextlib.AbstractContextManager[None]:
    """Turns an ``OSError`` of the code inside, which writes ``path``, into an ``InputError``."""
    return as_input_error(f"cannot write {path}", remedy, OSError)
