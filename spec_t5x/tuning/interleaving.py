"""Timing several programs in turn, so that drift of the machine affects all of them."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from spec_t5x.types import Float

Clock = Callable[[], float]

# Seconds that one timing takes at least: a thousand times what starting it costs.
_LONG_ENOUGH = 0.04
_MOST_CALLS = 2**14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Something to time: ``run(calls)`` does it ``calls`` times; 0 is allowed.

    Only the time beyond that of 0 calls counts: a compiled loop may do work before its first
    iteration, such as laying out weights, that decoding does once for a whole text.
    """

    run: Callable[[int], object]
    # None for as many as make a timing long enough (``compiled``).
    calls: int | None = None
    # Whether all of ``run`` counts, and no time of 0 calls is subtracted.
    whole: bool = False

    @classmethod
    def once(cls, run: Callable[[], object]) -> "Program":
        """A program that is long enough by itself and counts as a whole."""
        return cls(run=lambda calls: run(), calls=1, whole=True)

    def seconds(self, clock: Clock) -> float:
        """Seconds per call, the device's work included."""
        calls = self.calls or 1
        before = 0.0 if self.whole else _elapsed(self.run, 0, clock)
        # Noise may make the difference negative.
        return max(_elapsed(self.run, calls, clock) - before, 0.0) / calls

    def long_enough(self, clock: Clock) -> "Program":
        """With a number of calls that takes long enough to be timed, found by doubling."""
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
    """Runs each program twice; the first run compiles it.

    Returns:
      The programs, each with enough calls per timing, and the compile time of all together in
      seconds: what the first runs took beyond the second ones.
    """
    first = [_elapsed(program.run, program.calls or 1, clock) for program in programs]
    second = [_elapsed(program.run, program.calls or 1, clock) for program in programs]
    ready = [program.long_enough(clock) for program in programs]
    return ready, sum(max(a - b, 0.0) for a, b in zip(first, second, strict=True))


def interleaved(
    programs: Sequence[Program], rounds: int, clock: Clock = time.perf_counter
) -> Float[np.ndarray, "rounds programs"]:
    """Seconds of a call of each program, in rounds: all of them in turn, then again.

    Args:
      programs: what to time, already compiled (``compiled``).
      rounds: timings of each program.
      clock: returns seconds.
    """
    times = [[program.seconds(clock) for program in programs] for _ in range(rounds)]
    return np.asarray(times, np.float64)
