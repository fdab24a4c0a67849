"""The cost of an iteration here, in plain steps: measured once, and remembered.

Iterations with 1, 4 and 8 drafts (and 16 of a draft whose tokens cost nothing), plain steps and
the draft's prefill are timed in turn (``tuning.step_times``); costs are interpolated between these
limits. That takes a few seconds beside compilation, and is remembered for the machine, the
models and the settings.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops.decode_state import Loop
from spec_t5x.loops.pace import Costs
from spec_t5x.machine.progress import doing
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.tuning import step_times
from spec_t5x.tuning.interleaving import interleaved
from spec_t5x.tuning.store import Store
from spec_t5x.types import PyTree
from spec_t5x.verifiers import Verifier

log = logging.getLogger(__name__)

# Seconds of timing, compilation apart, after which no further round begins.
_BUDGET = 2.5
# Timings of each program at most.
_MOST_ROUNDS = 9
# The largest trees.
_MAX_DEPTH = 4
_MAX_NODES = 64


def largest_limit(draft: Draft, verifier: Verifier) -> int:
    """Returns the most drafts of an iteration whose number follows the measured costs."""
    if verifier.tree(1) is None:
        return draft.traits.max_worthwhile
    for depth in range(_MAX_DEPTH, 1, -1):
        try:
            if verifier.num_nodes(depth) <= _MAX_NODES:
                return depth
        except InputError:
            # The tree is too large for any target.
            continue
    return 1


def remembered(key: Mapping[str, Any], measure: Callable[[], Costs], store: Store) -> Costs:
    """Returns the stored costs for a key of ``identity.py``; measures and stores missing ones."""
    costs = store.load(key, Costs.parse)
    if costs is not None:
        log.debug("what speculation costs here was measured before: %s", costs)
        return costs
    start = time.perf_counter()
    with doing(log, "measuring what speculation costs here, once"):
        costs = measure()
    seconds = time.perf_counter() - start
    trouble = store.save(key, dataclasses.asdict(costs)) or "and will remember it"
    log.info("measured in %.1f s what speculation costs here, %s", seconds, trouble)
    return costs


def measure(target: Target, draft: Draft, inputs: PyTree, settings: Sampling, loop: Loop) -> Costs:
    """Times plain steps, the draft's prefill and iterations of a few limits, in turn.

    Args:
      target, draft, inputs, settings: as in decoding.
      loop: what is decoded; its gamma is the most drafts of an iteration.
    """
    whole, largest = loop.verifier.tree(loop.gamma) is not None, loop.gamma
    limits = [limit for limit in (() if whole else (1, 4, 8)) if limit < largest] + [largest]
    timed = step_times.Timed.half_way(target, draft, inputs, settings, loop)
    programs = [timed.iterations(0), timed.prefills, *map(timed.iterations, limits)]
    # A timing is a difference of two, so that noise makes the least of several too small.
    plain, prefill, *iterations = np.median(
        interleaved(programs, _MOST_ROUNDS, budget=_BUDGET), axis=0
    )
    return of_seconds(limits, plain, prefill, iterations, whole=whole)


def of_seconds(
    limits: Sequence[int],
    plain: float,
    prefill: float,
    iterations: Sequence[float],
    *,
    whole: bool = False,
) -> Costs:
    """Returns the costs for the seconds of a plain step, the prefill, and iterations by limit.

    ``whole``: an iteration has the one limit's drafts, or none.
    """
    step = max(float(plain), 1e-9)
    # An iteration does all that a plain step does, and one with more drafts no less.
    timed = np.maximum(np.maximum.accumulate(np.asarray(iterations) / step), 1.0)
    prefill, largest = max(float(prefill) / step, 0.0), limits[-1]
    if whole:
        between = [math.inf] * (largest - 1)
        return Costs(iteration=(1.0, *between, float(timed[-1])), prefill=prefill)
    # A first draft costs no less than a later one, on average: a smaller timing is noise, which
    # would make a draft that does not pay look as if it did.
    for i in range(len(limits) - 2, -1, -1):
        timed[i] = max(timed[i], 1 + (timed[i + 1] - 1) * limits[i] / limits[i + 1])
    points = np.interp(np.arange(1, largest + 1), limits, timed)
    # An empty proposal is on the line of the first two.
    empty = max(1.0, 2 * points[0] - points[1]) if largest > 1 else 1.0
    return Costs(iteration=(float(min(empty, points[0])), *points.tolist()), prefill=prefill)
