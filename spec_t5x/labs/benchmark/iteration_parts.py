"""Times of the parts of an iteration: drafts, verification, and the overhead beyond them.

Theorem 3.8 takes an iteration to last gamma draft steps and one target call. On top come
standardizing logits, verifying, appending, statistics and rolling back. A draft step includes
its sampling, as in c; verification is the target call over gamma + 1 tokens, logits included.

All parts are timed as loops on the device over the same state, in turn. The overhead is an
iteration less a loop of both networks in alternation: where their weights exceed the
processor's cache, each evicts the other's, and both are faster alone than in decoding.
"""

import statistics
from typing import Any

import numpy as np

from spec_t5x.interfaces import Draft, Target
from spec_t5x.labs.benchmark.step_times import proposals, target_calls
from spec_t5x.loops.decode_state import Loop
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.tuning.interleaving import interleaved
from spec_t5x.tuning.timed_calls import Timed
from spec_t5x.types import PyTree


def measure_parts(
    target: Target, draft: Draft, inputs: PyTree, settings: Sampling, loop: Loop, repeats: int
) -> dict[str, list[float]]:
    """Returns ``repeats`` times in milliseconds of each part, measured half way through the output.

    ``networks`` are gamma draft steps and a verification in alternation, ``proposal`` and
    ``verification`` either alone; ``plain_step`` is without drafts, ``target_call`` its call.

    Raises:
      InputError: the loop's verifier verifies trees.
    """
    timed = Timed.half_way(target, draft, inputs, settings, loop)
    programs = {
        "iteration": timed.iterations(),
        "networks": proposals(timed, scored=True),
        "proposal": proposals(timed),
        "verification": target_calls(timed, loop.gamma + 1),
        "plain_step": timed.iterations(0),
        "target_call": target_calls(timed, 1),
    }
    rounds = 1e3 * interleaved(list(programs.values()), repeats)
    return dict(zip(programs, rounds.T.tolist(), strict=True))


def overhead(parts: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the overhead (ms) and its share of an iteration, with quartiles, of measured parts.

    ``plain_overhead_share`` is the share of a plain step that is not the target call.
    """
    iteration, networks = (np.array(parts[name]) for name in ("iteration", "networks"))
    median = {name: statistics.median(times) for name, times in parts.items()}
    beyond = median["iteration"] - median["networks"]
    quartiles = np.quantile((iteration - networks) / iteration, [0.25, 0.75])
    return {
        "overhead": beyond,
        "overhead_share": beyond / median["iteration"],
        "overhead_quartiles": quartiles.tolist(),
        "plain_overhead_share": 1 - median["target_call"] / median["plain_step"],
    }
