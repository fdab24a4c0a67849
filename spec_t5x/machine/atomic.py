"""Files that are there whole or not at all, whenever the machine stops."""

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from spec_t5x.errors import InputError

_ENDING = ".writing"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A stream to a file that takes its name, and its place on the disk, once it is complete.

    When this fails, no part of it is left behind.

    Raises:
      OSError: it cannot be written: no space, no permission.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_ENDING}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Before the name: after a power cut, a name must not stand for an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """``whole_file`` of these bytes."""
    with whole_file(path) as file:
        for chunk in chunks:
            file.write(chunk)


@contextlib.contextmanager
def reported(path: Path) -> Iterator[None]:
    """Around what a run writes: that there is no room is told in a line.

    Raises:
      InputError: the system refused to write.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}: free some space and run the same "
            "command again to resume"
        ) from error


def remove_unfinished(directory: Path) -> None:
    """Removes what writers that were killed left behind; none may be at work."""
    for path in directory.glob(f".*{_ENDING}"):
        path.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
