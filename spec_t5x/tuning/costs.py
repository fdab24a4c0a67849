"""Measurement of the costs of speculation on this machine, in plain steps.

Plain steps, the draft's prefill and iterations with 1, 3, 5, 8 and the most drafts (with a tree,
its depth alone) are timed in turn (``tuning.timed_calls``); costs between these *limits* are
interpolated. Timing takes a few seconds beside compilation. The costs are stored for the machine,
the models and the settings, unless the timings vary widely. The kernels for CPUs multiply six rows
at once, hence the limit 5.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops.decode_state import Loop
from spec_t5x.loops.pace import Costs
from spec_t5x.machine.progress import doing
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.tuning.interleaving import interleaved
from spec_t5x.tuning.store import Store
from spec_t5x.tuning.timed_calls import Timed
from spec_t5x.types import Float, PyTree

log = logging.getLogger(__name__)

# Seconds of timing, compilation apart, after which no further round begins.
_BUDGET = 4.0
# Timings of each program at most.
_MOST_ROUNDS = 15
# Timings whose median is relied on.
_ENOUGH_ROUNDS = 5
# Spread of timings, their quartiles' distance over their median, above which other programs have
# disturbed them: at most .4 on a quiet machine with two cores, .8 to 2 beside busy programs.
_MOST_SPREAD = 0.5
# Most tokens of a half-finished output, all of which the draft is fed; few outputs have more.
_MOST_TOKENS = 512


def remembered(
    key: Mapping[str, Any], measure: Callable[[], tuple[Costs, bool]], store: Store
) -> Costs:
    """Returns costs stored for ``key`` (``store.identity``); measures and stores missing ones."""
    costs = store.load(key, Costs.parse)
    if costs is not None:
        log.debug("the costs of speculation were measured before: %s", costs)
        return costs
    start = time.perf_counter()
    with doing(log, "measuring the costs of speculation on this machine"):
        costs, steady = measure()
    seconds = time.perf_counter() - start
    outcome = "but do not store them: the timings vary widely, as on a busy machine"
    if steady:
        outcome = store.save(key, dataclasses.asdict(costs)) or "and stored them"
    log.info("measured the costs of speculation in %.1f s, %s", seconds, outcome)
    return costs


def measure(
    target: Target, draft: Draft, inputs: PyTree, settings: Sampling, loop: Loop
) -> tuple[Costs, bool]:
    """Measures the costs: times plain steps, the draft's prefill and iterations in turn.

    Also returns whether the timings are steady enough for the costs to be stored.

    Args:
      target, draft, inputs, settings: as in decoding (``loops.speculative_decode``).
      loop: settings of the loop; its gamma is the most drafts of an iteration.
    """
    whole, largest = loop.verifier.tree(loop.gamma) is not None, loop.gamma
    limits = [limit for limit in (() if whole else (1, 3, 5, 8)) if limit < largest] + [largest]
    timed = Timed.half_way(target, draft, inputs, settings, loop, most=_MOST_TOKENS)
    programs = [timed.iterations(0), timed.prefills, *map(timed.iterations, limits)]
    times = interleaved(programs, _MOST_ROUNDS, budget=_BUDGET)
    return of_times(limits, times, whole=whole), _are_steady(times)


def _are_steady(times: Float[np.ndarray, "rounds programs"]) -> bool:
    """Tells whether plain steps, and iterations in plain steps, vary little between rounds."""
    used = np.concatenate([times[:, :1], times[:, 2:] / times[:, :1]], axis=1)
    # If there are few timings, none is left out.
    left_out = 0.25 if len(times) >= _ENOUGH_ROUNDS else 0.0
    low, middle, high = np.quantile(used, (left_out, 0.5, 1 - left_out), axis=0)
    return bool(np.all(high - low <= _MOST_SPREAD * middle))


def of_times(
    limits: Sequence[int], times: Float[np.ndarray, "rounds programs"], *, whole: bool = False
) -> Costs:
    """Converts seconds of a plain step, the prefill and an iteration at each limit to costs.

    If ``whole``, as with a tree, there is one limit, and an iteration has so many drafts or none.
    """
    # Ratios within a round are least affected by drift. Their median is used, not their least: a
    # timing is a difference of two, so noise may make it too small.
    prefill, *iterations = np.median(times[:, 1:] / times[:, :1], axis=0)
    # An iteration does all that a plain step does, and one with more drafts no less.
    timed = np.maximum(np.maximum.accumulate(iterations), 1.0)
    prefill, largest = float(prefill), limits[-1]
    if whole:
        between = [math.inf] * (largest - 1)
        return Costs(iteration=(1.0, *between, float(timed[-1])), prefill=prefill)
    # Where memory bounds a call of few positions and arithmetic one of many, a first draft costs
    # less than a later one. Without enough timings it may be noise, which would make a draft that
    # does not pay look as if it did.
    if len(times) < _ENOUGH_ROUNDS:
        for i in range(len(limits) - 2, -1, -1):
            timed[i] = max(timed[i], 1 + (timed[i + 1] - 1) * limits[i] / limits[i + 1])
    points = np.interp(np.arange(1, largest + 1), limits, timed)
    # The cost of an empty proposal is extrapolated from those of 1 and 2 drafts.
    empty = max(1.0, 2 * points[0] - points[1]) if largest > 1 else 1.0
    return Costs(iteration=(float(empty), *points.tolist()), prefill=prefill)
