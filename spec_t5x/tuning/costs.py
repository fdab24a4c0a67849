"""What an iteration costs here, in plain steps: measured with the program that decodes.

One program does all: the paced loop with the limit forced to 0, 1, 2, 4 … drafts. Its time
for a few tokens and for a single iteration, by the iterations that lie between, is what an
iteration takes, its overhead included; between the limits that are timed lies a straight
line. It takes about a second once the program is compiled, which decoding needs anyway, and
is remembered for the machine, the models and the settings.
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
from spec_t5x.outputs import Decoded
from spec_t5x.pace import MAX_LIMIT, Costs, Pace
from spec_t5x.tuning.interleaving import Clock
from spec_t5x.tuning.store import Store
from spec_t5x.verifiers import TreeVerifier, Verifier

log = logging.getLogger(__name__)

# ``decode(pace, tokens)`` decodes what is to be decoded, cut short after so many tokens.
Decode = Callable[[Pace, int], Decoded]

# Seconds of timing, compilation apart.
BUDGET = 2.0
# Rounds at least and at most; the median counts.
_ROUNDS = (2, 9)
# Seconds that one timing should take: a hundred times what the clock and dispatch add.
_LONG_ENOUGH = 0.03
# A tree grows with its depth: none is deeper, nor larger.
_MAX_DEPTH = 4
_MAX_NODES = 64


def largest_limit(draft: Draft, verifier: Verifier | TreeVerifier) -> int:
    """The most drafts that an iteration may have where their number follows what pays."""
    if not isinstance(verifier, TreeVerifier):
        return min(MAX_LIMIT, draft.max_proposal or MAX_LIMIT)
    for depth in range(_MAX_DEPTH, 1, -1):
        try:
            if verifier.num_nodes(depth) <= _MAX_NODES:
                return depth
        except InputError:
            # A tree that is too large for anyone.
            continue
    return 1


def remembered(key: Mapping[str, Any], measure: Callable[[], Costs], store: Store) -> Costs:
    """What was measured for ``key`` before, or is now.

    Args:
      key: what the costs depend on (``identity.py``).
      measure: measures them.
      store: where they are remembered.
    """
    costs = store.load(key)
    if costs is None:
        start = time.perf_counter()
        costs = measure()
        seconds = time.perf_counter() - start
        trouble = store.save(key, costs) or "and will remember it"
        log.info("measured in %.1f s what speculation costs here, %s", seconds, trouble)
    return costs


def measure(
    decode: Decode,
    largest: int,
    *,
    whole: bool = False,
    budget: float = BUDGET,
    clock: Clock = time.perf_counter,
) -> Costs:
    """Times iterations of a few limits and plain steps, in turn.

    Args:
      decode: runs the paced loop.
      largest: the most drafts of an iteration.
      whole: whether an iteration has as many or none, as with a tree.
      budget: seconds of timing, compilation apart.
      clock: seconds from any time on.
    """
    between = () if whole else (1, 2, 4)
    limits = [0, *(limit for limit in between if limit < largest), largest]
    timer = _Timer(decode, largest, clock)
    # Compiles.
    timer.run(0, 1)
    seconds, calls = timer.run(0, 1 + 2 * (largest + 1))
    # Tokens that make a timing long enough, and yet leave time for the fewest rounds.
    wanted = min(_LONG_ENOUGH, budget / (_ROUNDS[0] * 2 * len(limits)))
    more = math.ceil(min(max(wanted * calls / max(seconds, 1e-9), 2), 64))
    rounds, begun = [], clock()
    while len(rounds) < _ROUNDS[0] or (len(rounds) < _ROUNDS[1] and clock() - begun < budget):
        # One iteration, and several.
        lengths = [(limit, (1, 1 + more * (limit + 1))) for limit in limits]
        rounds.append([[timer.run(limit, n) for n in tokens] for limit, tokens in lengths])
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


def _costs(limits: list[int], rounds: np.ndarray) -> Costs:
    """From seconds and calls ``[round, limit, short or long, seconds and calls]``."""
    (short, long), calls = np.moveaxis(np.median(rounds[..., 0], axis=0), 1, 0), rounds[0, :, :, 1]
    steps = (long - short) / np.maximum(calls[:, 1] - calls[:, 0], 1)
    plain = max(steps[0], 1e-9)
    # An iteration does all that a plain step does.
    timed = np.maximum(np.maximum.accumulate(steps / plain), 1.0)
    # One iteration and the draft's prefill, beside one plain step.
    prefill = (short[1:] - short[0]) / plain - (timed[1:] - 1)
    largest = limits[-1]
    if len(limits) == 2 and largest > 1:
        # A tree: all of it, or nothing.
        between = [math.inf] * (largest - 1)
        iteration = (1.0, *between, float(timed[-1]))
    else:
        # An empty proposal lies on the line of the first two.
        empty = max(1.0, 2 * timed[1] - timed[2]) if largest > 1 else 1.0
        points = np.interp(np.arange(1, largest + 1), limits[1:], timed[1:])
        iteration = (min(empty, float(timed[1])), *points.tolist())
    return Costs(iteration=iteration, prefill=max(float(np.median(prefill)), 0.0))
