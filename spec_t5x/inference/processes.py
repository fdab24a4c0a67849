"""The processes of a run: how they meet, agree on the run, and keep other runs out.

They meet by ``jax.distributed`` at the start. Then each works by itself on its own shards, as
hosts of T5X's ``infer`` do with replicas of a model, and the loss of one stops no other. Each
holds the lock of its number in the output directory; the system frees the lock of a process
that ends, however it ends, so that a killed run never blocks the next.
"""

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import filelock
import jax
import numpy as np
from jax.experimental import multihost_utils

from spec_t5x.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """How a process finds the others; the names are T5X's."""

    # HOST:PORT of process 0. With it the next two.
    coordinator_address: str | None = None
    process_count: int | None = None
    process_index: int | None = None
    # Find the others by the environment instead: Cloud TPU, Slurm, Open MPI.
    multiprocess: bool = False

    def __post_init__(self):
        given = (self.coordinator_address, self.process_count, self.process_index)
        if given.count(None) in (1, 2) or (
            self.process_count and not 0 <= self.process_index < self.process_count
        ):
            raise InputError(
                f"coordinator_address is {given[0]}, process_count {given[1]} and process_index "
                f"{given[2]}: give all three, and an index from 0 to below the count"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """This process among those of the run."""

    index: int = 0
    count: int = 1

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A step of the start that every process must complete.

        Raises:
          InputError: another process did not.
        """
        try:
            yield
        except InputError:
            self._agree(False)
            raise
        if not self._agree(True):
            raise InputError("another process of this run could not start: see its message")

    def part(self) -> None:
        """Ends what the processes have in common: from here each is alone."""
        if self.count > 1:
            jax.distributed.shutdown()

    def _agree(self, fine: bool) -> bool:
        """Whether all processes are fine; waits for them."""
        if self.count == 1:
            return fine
        try:
            return bool(multihost_utils.process_allgather(np.int32(fine)).min())
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            raise InputError(
                f"another process of this run was lost ({str(error).splitlines()[0]}): check it"
            ) from error


def join(options: HostOptions) -> Hosts:
    """Meets the other processes, if the options name any.

    Raises:
      InputError: they cannot be met.
    """
    if options.coordinator_address is None and not options.multiprocess:
        return Hosts()
    try:
        jax.distributed.initialize(
            options.coordinator_address, options.process_count, options.process_index
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"cannot meet the other processes ({str(error).splitlines()[0]}): give "
            "coordinator_address, process_count and process_index"
        ) from error
    return Hosts(index=jax.process_index(), count=jax.process_count())


@contextlib.contextmanager
def locked(directory: Path, process: int = 0) -> Iterator[None]:
    """Holds the lock of a run's process within the ``with``.

    Raises:
      InputError: another run holds it, or the directory cannot be written.
    """
    path = _lock_path(directory, process)
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


def check_alone(directory: Path, count: int) -> None:
    """No process works here but 0 to ``count`` - 1.

    A run of more processes may have lost the ones that share a number with this run.

    Raises:
      InputError: a process of another run does.
    """
    for path in sorted(directory.glob(".lock-[0-9]*")):
        process = int(path.name.removeprefix(".lock-"))
        if process >= count:
            with locked(directory, process):
                pass


def wait_for(directory: Path, process: int) -> None:
    """Until that process of the run has ended."""
    with filelock.FileLock(_lock_path(directory, process)):
        pass


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """A step of workers that know nothing of one another; within it, there is no other."""
    with filelock.FileLock(directory / ".lock-step"):
        yield


def _lock_path(directory: Path, process: int) -> Path:
    return directory / f".lock-{process:05}"
