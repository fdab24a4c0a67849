"""The processes of a run, by ``jax.distributed``.

They agree on the run at its start. Then each works by itself on its own shards, as
hosts of T5X's ``infer`` do with replicas of a model, and one that is lost stops no other.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

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
    # Ask the surroundings instead: Cloud TPU, Slurm, Open MPI.
    multiprocess: bool = False

    def __post_init__(self):
        given = (self.coordinator_address, self.process_count, self.process_index)
        if any(value is not None for value in given) and None in given:
            raise InputError(
                f"coordinator_address is {given[0]}, process_count {given[1]} and process_index "
                f"{given[2]}: give all three"
            )
        if self.process_count is not None and not 0 <= self.process_index < self.process_count:
            raise InputError(
                f"process_index is {self.process_index} of {self.process_count} processes: give "
                f"0 to {self.process_count - 1}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """This process among those of the run."""

    index: int = 0
    count: int = 1

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A part of the start that every process must get through.

        Raises:
          InputError: another process did not.
        """
        try:
            yield
        except InputError:
            self._agree(False)
            raise
        if not self._agree(True):
            raise InputError("another process of this run could not begin: see its message")

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
            reason = str(error).splitlines()[0]
            raise InputError(
                f"another process of this run was lost ({reason}): see to it"
            ) from error


def join(options: HostOptions) -> Hosts:
    """Meets the other processes, if the options speak of any.

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
        reason = str(error).splitlines()[0]
        raise InputError(
            f"cannot meet the other processes ({reason}): give coordinator_address, "
            "process_count and process_index"
        ) from error
    return Hosts(index=jax.process_index(), count=jax.process_count())
