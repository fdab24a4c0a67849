"""Timing several programs in turn, so that a change of the machine's mood falls on all."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from spec_t5x.types import Float

Clock = Callable[[], float]

# What one timing shall take at least, in seconds: a thousand times what starting costs.
_LONG_ENOUGH = 0.04
# Nothing that is worth timing needs more.
_MOST_CALLS = 2**14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Something to time: ``run(calls)`` does it ``calls`` times over, 0 times too.

    Only what comes on top of 0 times counts: a compiled loop may do work before its first
    turn that it would do once for a whole text, such as laying out weights.
    """

    run: Callable[[int], object]
    # None for as many as make a timing long enough to be trusted.
    calls: int | None = None
    # Whether nothing is taken off: ``run`` is itself all that is to be timed.
    whole: bool = False

    @classmethod
    def once(cls, run: Callable[[], object]) -> "Program":
        """One that is long enough by itself, and of which all counts."""
        return cls(run=lambda calls: run(), calls=1, whole=True)

    def seconds(self, clock: Clock) -> float:
        """Seconds of a call, the device's work included."""
        calls = self.calls or 1
        before = 0.0 if self.whole else _elapsed(self.run, 0, clock)
        # The clock's grain and the system's whims: no call takes less than nothing.
        return max(_elapsed(self.run, calls, clock) - before, 0.0) / calls

    def long_enough(self, clock: Clock) -> "Program":
        """With a number of calls whose timing the system's whims do not drown.

        Found by doubling: a single call of something small may seem to take no time.
        """
        if self.calls is not None:
            return self
        tried = dataclasses.replace(self, calls=1)
        seconds = tried.seconds(clock)
        while tried.calls < _MOST_CALLS and tried.calls * seconds < _LONG_ENOUGH / 4:
            tried = dataclasses.replace(tried, calls=2 * tried.calls)
            seconds = tried.seconds(clock)
        needed = round(_LONG_ENOUGH / max(seconds, _LONG_ENOUGH / _MOST_CALLS))
        return dataclasses.replace(self, calls=max(needed, 1))


def _elapsed(run: Callable[[int], object], calls: int, clock: Clock) -> float:
    start = clock()
    jax.block_until_ready(run(calls))
    return clock() - start


def compiled(programs: Sequence[Program], clock: Clock = time.perf_counter):
    """Runs each program twice: the second time it is compiled.

    Returns:
      The programs, each with as many calls as make a timing long enough, and the seconds
      that the first runs took beyond the second ones, of all together.
    """
    first = [_elapsed(program.run, program.calls or 1, clock) for program in programs]
    second = [_elapsed(program.run, program.calls or 1, clock) for program in programs]
    ready = [program.long_enough(clock) for program in programs]
    return ready, sum(max(a - b, 0.0) for a, b in zip(first, second, strict=True))


def interleaved(
    programs: Sequence[Program],
    *,
    budget: float = 0.0,
    least: int = 3,
    most: int = 25,
    clock: Clock = time.perf_counter,
) -> Float[np.ndarray, "rounds programs"]:
    """Seconds of a call of each program, in rounds: all of them in turn, then again.

    Args:
      programs: what to time; each is run once before, to be compiled.
      budget: seconds after which no round is begun.
      least: rounds even so.
      most: rounds at most.
      clock: seconds from any time on.
    """
    for program in programs:
        jax.block_until_ready(program.run(program.calls or 1))
    begun, rounds = clock(), []
    while len(rounds) < least or (len(rounds) < most and clock() - begun < budget):
        rounds.append([program.seconds(clock) for program in programs])
    return np.asarray(rounds, np.float64)
