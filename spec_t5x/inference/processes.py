"""Processes of a run, and the locks that keep other runs out of its output directory.

Each process locks a file with its index in the output directory. The operating system releases
the lock when the process ends, even by a kill, so that a killed run never blocks the next. The
end of one process does not stop the others.
"""

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import jax

from spec_t5x.errors import InputError, as_input_error
from spec_t5x.inference.infer_options import HostOptions
from spec_t5x.machine.accelerators import fault_of
from spec_t5x.machine.progress import doing

log = logging.getLogger(__name__)


def join(options: HostOptions) -> tuple[int, int] | None:
    """Connects the processes by JAX for a moment; returns this one's index and their number.

    Returns None if the options name no others. Raises ``InputError`` if they cannot be connected.
    """
    address = options.coordinator_address
    if address is None and not options.multiprocess:
        return None
    where = f" at {address}" if address else ""
    try:
        with doing(log, f"waiting for the other processes{where}"):
            jax.distributed.initialize(address, options.process_count, options.process_index)
        found = jax.process_index(), jax.process_count()
        # Disconnects, because JAX would end all processes when one is lost.
        jax.distributed.shutdown()
    except (RuntimeError, ValueError) as error:
        raise InputError(
            fault_of(error)
            or f"cannot connect to the other processes ({str(error).splitlines()[0]}): give "
            "coordinator_address, process_count and process_index"
        ) from error
    # JAX stores compiled programs in process 0 alone, and keeps the index after ``shutdown``. Each
    # process here is on its own, and other hosts do not see the first one's cache.
    with contextlib.suppress(AttributeError):
        jax._src.distributed.global_state.process_id = 0
    return found


@contextlib.contextmanager
def locked(directory: Path, process: int = 0, *, needed: bool = True) -> Iterator[None]:
    """Holds the lock of the worker with index ``process`` within the ``with``.

    Raises ``InputError`` if another run holds the lock, the directory cannot be written or, where
    the lock is ``needed``, the file system has no locks.
    """
    path = directory / f".lock-{process:05}"
    with _held(path, fcntl.LOCK_EX | fcntl.LOCK_NB, needed) as descriptor:
        with contextlib.suppress(OSError):
            # The text is only for a message: a full disk does not matter.
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def check_alone(directory: Path) -> None:
    """Raises ``InputError`` if a worker with an index above 0 holds its lock."""
    for path in sorted(directory.glob(".lock-[0-9]*")):
        if process := int(path.name.removeprefix(".lock-")):
            with locked(directory, process):
                pass


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Waits for a lock that one worker of the run has at a time; holds it within the ``with``."""
    with _held(directory / ".lock-step", fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def _held(path: Path, operation: int, needed: bool = True) -> Iterator[int]:
    """Yields the descriptor of a file locked by ``flock``; raises ``InputError`` if it cannot."""
    remedy = "give a directory that can be written, on a file system with locks (a local disk)"
    with contextlib.ExitStack() as opened:
        with as_input_error(f"cannot lock {path}", remedy, OSError):
            # Opened for writing, as NFS needs it; a link might lead to another file of the user.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            opened.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, operation)
            except BlockingIOError as error:
                holder = path.read_text(encoding="utf-8", errors="replace") or "another run"
                raise InputError(
                    f"{path.parent} is in use by {holder}: wait for it, stop it, or give another "
                    "output directory"
                ) from error
            except OSError:
                if needed:
                    raise
        yield descriptor
