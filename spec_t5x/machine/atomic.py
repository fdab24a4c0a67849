"""Atomic writing: a file is complete or does not exist, even if the machine stops."""

import contextlib
import errno
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from spec_t5x.errors import InputError

_ENDING = ".writing"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a binary stream to a temporary file, renamed to ``path`` once it is on the disk.

    If an error occurs, in the code inside or in writing, the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_ENDING}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Before the renaming: a power cut must not leave an empty file of this name.
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """Writes ``chunks``, one after the other, to ``path`` by ``whole_file``."""
    with whole_file(path) as file:
        for chunk in chunks:
            file.write(chunk)


def check_can_be_made(path: Path) -> None:
    """Raises ``InputError`` unless a file or folder can be made at ``path``; makes nothing."""
    there = next(filter(os.path.exists, (path.absolute(), *path.absolute().parents)))
    if not (os.path.isdir(there) and os.access(there, os.W_OK)):
        raise InputError(f"{there} cannot be written to: give another folder")


def remove_unfinished(directory: Path) -> None:
    """Removes temporary files that killed writers left; no writer may be running there."""
    for path in directory.glob(f".*{_ENDING}"):
        path.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems, of networks and of containers, cannot sync a directory.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
