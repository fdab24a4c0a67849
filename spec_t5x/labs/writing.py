"""Errors of writing files, reported in one line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from spec_t5x.errors import InputError


@contextlib.contextmanager
def reported(
    path: Path, remedy: str = "free some space and run the same command again to resume"
) -> Iterator[None]:
    """Turns an ``OSError`` of the code inside, which writes ``path``, into an ``InputError``."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}: {remedy}") from error
