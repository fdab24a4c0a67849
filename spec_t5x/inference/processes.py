"""The processes of a run: each answers its own shards, and other runs are kept out.

Each process holds the lock of its number in the output directory; the system frees the lock of a
process that ends, however it ends, so that a killed run never blocks the next. The loss of one
process stops no other.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import filelock
import jax

from spec_t5x.errors import InputError
from spec_t5x.inference.infer_options import HostOptions


def join(options: HostOptions) -> tuple[int, int] | None:
    """Meets the other processes, as JAX requires on several hosts, and parts from them.

    Returns:
      The number of this process and how many there are; None if the options name no others.

    Raises:
      InputError: they cannot be met.
    """
    if options.coordinator_address is None and not options.multiprocess:
        return None
    try:
        jax.distributed.initialize(
            options.coordinator_address, options.process_count, options.process_index
        )
        found = jax.process_index(), jax.process_count()
        # From here the loss of one does not matter to another.
        jax.distributed.shutdown()
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"cannot meet the other processes ({str(error).splitlines()[0]}): give "
            "coordinator_address, process_count and process_index"
        ) from error
    return found


@contextlib.contextmanager
def locked(directory: Path, process: int = 0) -> Iterator[None]:
    """Holds the lock of a run's process within the ``with``.

    Raises:
      InputError: another run holds it, or the directory cannot be written.
    """
    path = directory / f".lock-{process:05}"
    lock = filelock.FileLock(path, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        holder = path.read_text(encoding="utf-8", errors="replace") or "another run"
        raise InputError(
            f"{directory} is in use by {holder}: wait for it, stop it, or give another --output_dir"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise InputError(
            f"cannot lock {path} ({getattr(error, 'strerror', None) or error}): give an "
            "--output_dir that can be written, on a file system with locks such as a local disk"
        ) from error
    try:
        with contextlib.suppress(OSError):
            # For the message above only: a full disk does not matter.
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        lock.release()


def check_alone(directory: Path) -> None:
    """Raises ``InputError`` if a worker, whose number is not 0, holds its lock."""
    for path in sorted(directory.glob(".lock-[0-9]*")):
        if process := int(path.name.removeprefix(".lock-")):
            with locked(directory, process):
                pass


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Keeps other workers from the same step within the ``with``."""
    with filelock.FileLock(directory / ".lock-step"):
        yield
