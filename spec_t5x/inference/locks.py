"""One run at a time in a directory.

Each process of a run holds the lock of its number. The system takes a lock from a
process that ends, however it ends, so that a killed run never stands in the way.
"""

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from spec_t5x.errors import InputError

_NAME = re.compile(r"\.lock-(\d+)")


@contextlib.contextmanager
def held(directory: Path, process: int = 0) -> Iterator[None]:
    """Holds the lock of a run's process within the ``with``.

    Raises:
      InputError: another run holds it, or the directory cannot be written.
    """
    path = _path(directory, process)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(
            f"cannot write to {directory} ({error.strerror}): give another --output_dir, or "
            "see to its space and permissions"
        ) from error
    try:
        if not _try_lock(descriptor):
            raise InputError(_in_use(path))
        with contextlib.suppress(OSError):
            # For the message above, no more: a full disk is no obstacle.
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_held(directory: Path, process: int) -> bool:
    """Whether a process of that number is at work in the directory."""
    try:
        descriptor = os.open(_path(directory, process), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def check_alone(directory: Path, count: int) -> None:
    """Nobody is at work here but the processes 0 to ``count`` - 1.

    A run of more processes may have lost the ones that share a number with this run.

    Raises:
      InputError: a process of another run is.
    """
    for path in sorted(directory.glob(".lock-*")):
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) >= count and is_held(directory, int(match[1])):
            raise InputError(_in_use(path))


def _path(directory: Path, process: int) -> Path:
    return directory / f".lock-{process:05}"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise InputError(
            f"the file system of the output directory keeps no locks ({error.strerror}): give "
            "--output_dir one on another, such as a local disk"
        ) from error
    return True


def _in_use(path: Path) -> str:
    holder = path.read_text(encoding="utf-8", errors="replace") or "another run"
    return (
        f"{path.parent} is in use by {holder}: wait for it, stop it, or give another --output_dir"
    )
