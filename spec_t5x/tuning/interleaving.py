"""Timing several programs in turn, so that drift of the machine affects all of them."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spec_t5x.types import Float

# ``run(calls)`` repeats a program ``calls`` times; 0 is allowed.
Calls = Callable[[int], object]

# Seconds that one timing takes, about: a thousand times as long as the start of a program.
_LONG_ENOUGH = 0.04
_MOST_CALLS = 2**14


def interleaved(
    programs: Sequence[Calls], rounds: int, *, budget: float = math.inf
) -> Float[np.ndarray, "rounds programs"]:
    """Measures the seconds of one call of each program; in each round all are timed in turn.

    At most ``rounds`` are made; after the second, none begins once ``budget`` seconds are over.
    Programs are compiled first. A timing covers enough calls to take about 0.04 s, and the time of
    0 calls is subtracted: a compiled loop may do work before its first iteration, such as laying
    out weights, that decoding does once for a whole text.
    """
    for run in programs:
        elapsed(lambda run=run: run(1))
    calls = [_enough_calls(run) for run in programs]
    begun, times = time.perf_counter(), []
    while len(times) < rounds and (len(times) < 2 or time.perf_counter() - begun < budget):
        times.append([_seconds(run, count) for run, count in zip(programs, calls, strict=True)])
    return np.asarray(times, np.float64)


def elapsed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds of ``run()``, the device's work included, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - start, result


def _seconds(run: Calls, calls: int) -> float:
    before, _ = elapsed(lambda: run(0))
    # Noise may make the difference negative, but callers divide times by one another.
    return max(elapsed(lambda: run(calls))[0] - before, 1e-9) / calls


def _enough_calls(run: Calls) -> int:
    """Returns the number of calls that take about ``_LONG_ENOUGH`` seconds, found by doubling."""
    for calls in (2**i for i in range(_MOST_CALLS.bit_length())):
        # The shorter of two timings: interrupted, a few calls would look like enough.
        seconds = min(_seconds(run, calls) for _ in range(2))
        if calls * seconds >= _LONG_ENOUGH / 4:
            break
    return max(round(_LONG_ENOUGH / max(seconds, _LONG_ENOUGH / _MOST_CALLS)), 1)
