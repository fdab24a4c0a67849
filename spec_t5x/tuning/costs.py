"""The cost of an iteration here, in plain steps: measured with the program that decodes.

One program is timed, the paced loop with its limit forced to 0, 1, 4 and 8 drafts, and to 16 of a
draft whose tokens cost nothing: its time for a few tokens less that for one iteration, divided by
the iterations between them. Overhead is included; between these limits costs are interpolated. That
takes two to seven seconds once the program is compiled, which decoding needs anyway, and is
remembered for the machine, the models and the settings. What was timed while other programs kept
the processors busy is measured again by the first process that finds them quiet.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.machine.other_programs import MUCH, OtherPrograms
from spec_t5x.machine.progress import doing
from spec_t5x.tuning.interleaving import Clock
from spec_t5x.tuning.store import Store
from spec_t5x.verifiers import Verifier

log = logging.getLogger(__name__)

# ``decode(pace, tokens)`` decodes a batch, cut short after this many tokens.
Decode = Callable[[Pace, int], Decoded]

# Seconds of timing, compilation apart.
_BUDGET = 2.5
# The shortest time counts: other load makes times longer, never shorter.
_MOST_ROUNDS = 9
# Seconds that the steps of a timing should take: hundreds of times what the clock and dispatch
# add, and half of the prefill. Plain steps, by which all are divided, take twice that.
_LONG_ENOUGH = 0.05
_SHARE_OF_PREFILL = 0.5
# Guesses before anything is measured: what a draft adds to an iteration, in plain steps, and
# the tokens of an iteration.
_EXPECTED_COST, _EXPECTED_TOKENS = 0.4, 1.5
# The largest trees.
_MAX_DEPTH = 4
_MAX_NODES = 64
_since_import = OtherPrograms()


def largest_limit(draft: Draft, verifier: Verifier) -> int:
    """The most drafts that an iteration may have where their number follows what pays."""
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
    """The stored costs for a key of ``identity.py``; measured and stored where there are none."""
    costs = store.load(key, Costs.parse)
    if costs is not None and not outdated(costs):
        log.debug("what speculation costs here was measured before: %s", costs)
    else:
        start, others = time.perf_counter(), OtherPrograms()
        with doing(log, "measuring what speculation costs here, once"):
            costs = dataclasses.replace(measure(), beside=others.share)
        seconds = time.perf_counter() - start
        timed, until = "", ""
        if costs.beside > MUCH:
            timed = f" while other programs used {costs.beside:.0%} of the processors"
            until = " while other programs are as busy"
        trouble = store.save(key, dataclasses.asdict(costs)) or f"and will remember it{until}"
        log.info("measured in %.1f s what speculation costs here%s, %s", seconds, timed, trouble)
    return costs


def outdated(costs: Costs) -> bool:
    """Whether they were measured beside other programs that are done."""
    return costs.beside > MUCH >= _since_import.share


def measure(
    decode: Decode,
    largest: int,
    *,
    whole: bool = False,
    clock: Clock = time.perf_counter,
) -> Costs:
    """Times iterations of a few limits and plain steps, in turn.

    Args:
      decode: runs the paced loop.
      largest: the most drafts of an iteration.
      whole: whether an iteration has either ``largest`` drafts or none, as with a tree.
      clock: returns seconds.
    """
    limits = [limit for limit in (() if whole else (1, 4, 8)) if limit < largest] + [largest]
    timer = _Timer(decode, largest, clock)
    # Compiles.
    timer.run(0, 1)
    begun = clock()
    # One step, plain and with drafts, and several of every limit.
    timings = [(0, 1), (limits[0], 1), *timer.lengths([0, *limits])]
    rounds = []
    while len(rounds) < _MOST_ROUNDS:
        rounds.append([timer.run(limit, tokens) for limit, tokens in timings])
        if (clock() - begun) * (1 + 1 / len(rounds)) > _BUDGET:
            break
    if len(rounds) == 1:
        # By what these take all is divided, and whether a draft pays at all depends on them.
        again = [timer.run(limit, tokens) for limit, tokens in timings[:4]]
        rounds.append(again + rounds[0][4:])
    return _costs(limits, np.asarray(rounds, np.float64))


@dataclasses.dataclass(frozen=True)
class _Timer:
    decode: Decode
    largest: int
    clock: Clock

    def run(self, limit: int, tokens: int) -> tuple[float, int]:
        """Seconds, and target calls, of a decoding cut short."""
        pace = Pace.start(Costs.by_formula(c=0.0, largest=self.largest), forced=limit)
        start = self.clock()
        decoded = jax.block_until_ready(self.decode(pace, tokens))
        seconds = self.clock() - start
        counted = jax.device_get(decoded.pace)
        return seconds, int(counted.plain_steps + counted.iterations)

    def lengths(self, limits: list[int]) -> list[tuple[int, int]]:
        """Each limit with the number of tokens whose steps take long enough."""
        prefill, _ = self.run(0, 1)
        seconds, calls = self.run(0, 9)
        step = max((seconds - prefill) / max(calls - 1, 1), 1e-6)
        wanted = max(_LONG_ENOUGH, _SHARE_OF_PREFILL * prefill) / step

        def tokens(limit: int) -> int:
            steps = min(max(wanted / (1 + _EXPECTED_COST * limit), 3), 32)
            brought = steps * (_EXPECTED_TOKENS if limit else 2)
            # More than the first iteration may append.
            return 1 + math.ceil(max(brought, limit + 2))

        return [(limit, tokens(limit)) for limit in limits]


def _costs(limits: list[int], rounds: np.ndarray) -> Costs:
    """From seconds and calls ``[round, timing, seconds and calls]``.

    The timings are one plain step, one iteration, several plain steps, and several iterations
    of each of the limits.
    """
    seconds, calls = np.min(rounds[..., 0], axis=0), rounds[0, :, 1]
    one_step, one_iteration = seconds[:2]
    plain = max(float(seconds[2] - one_step) / max(calls[2] - 1, 1), 1e-9)
    first = (seconds[3] - one_iteration) / max(calls[3] - 1, 1)
    steps = (seconds[3:] - (one_iteration - first)) / calls[3:]
    # An iteration does all that a plain step does, and one with more drafts no less.
    timed = np.maximum(np.maximum.accumulate(steps / plain), 1.0)
    # A first draft costs no less than a later one, on average: what was timed as less is noise,
    # and would have a draft asked for that does not pay.
    for i in range(len(limits) - 2, -1, -1):
        timed[i] = max(timed[i], 1 + (timed[i + 1] - 1) * limits[i] / limits[i + 1])
    # One iteration and the draft's prefill, beside one plain step.
    prefill = max(float((one_iteration - one_step) / plain - (timed[0] - 1)), 0.0)
    largest = limits[-1]
    if len(limits) == 1 and largest > 1:
        # A tree: all of it, or nothing.
        between = [math.inf] * (largest - 1)
        return Costs(iteration=(1.0, *between, float(timed[-1])), prefill=prefill, step=plain)
    points = np.interp(np.arange(1, largest + 1), limits, timed)
    # An empty proposal lies on the line of the first two.
    empty = max(1.0, 2 * points[0] - points[1]) if largest > 1 else 1.0
    iteration = (float(min(empty, points[0])), *points.tolist())
    return Costs(iteration=iteration, prefill=prefill, step=plain)
