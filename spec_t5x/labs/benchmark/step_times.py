"""Times of a target call, a draft step and a verification: the paper's c and T(m)."""

import dataclasses

import numpy as np

from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops.decode_state import DEFAULT_VERIFIER, Loop
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.theory import formulas
from spec_t5x.tuning.interleaving import interleaved
from spec_t5x.tuning.timed_calls import Timed
from spec_t5x.types import PyTree
from spec_t5x.verifiers import Verifier


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Milliseconds of a call over all rows of a batch, medians over repetitions."""

    # A target call over one new token of each row.
    target: float
    # A draft step: the time of a proposal over gamma.
    draft: float
    # A target call over all tokens that it verifies: gamma + 1 of each row, or a tree's nodes.
    verification: float

    @property
    def c(self) -> float:
        """Time of a draft step in target steps, the paper's cost coefficient (Definition 3.7)."""
        return self.draft / self.target

    @property
    def verification_cost(self) -> float:
        """Time of a verification in target steps; the paper assumes 1."""
        return self.verification / self.target

    def speed_up(self, alpha: float, gamma: int, *, as_paper: bool = False) -> float:
        """Returns Theorem 3.8's speed-up; if ``as_paper``, verification costs one target step."""
        cost = 1.0 if as_paper else self.verification_cost
        return formulas.wall_time_improvement(alpha, gamma, self.c, cost)

    def batch_speed_up(self, alpha: float, gamma: int, *, rows: int, length: int) -> float:
        """Returns the expected speed-up of a batch of ``rows`` rows with ``length`` tokens each."""
        iterations = formulas.expected_iterations(alpha, gamma, length, rows)
        return length / (
            iterations * formulas.iteration_time(gamma, self.c, self.verification_cost)
        )


def measure_step_times(
    target: Target,
    draft: Draft,
    inputs: PyTree,
    *,
    gamma: int,
    max_decode_len: int,
    settings: Sampling,
    verifier: Verifier = DEFAULT_VERIFIER,
) -> StepTimes:
    """Measures the calls on this device, with caches of decoding's size and rows of half length.

    The three calls are timed in turn, nine times; the results are medians.

    Args:
      target, draft: as in decoding.
      inputs: the argument of ``prefill`` of target and draft.
      gamma: drafts per iteration, at least 1.
      max_decode_len: room for tokens, as in decoding.
      settings: sampling settings of both.
      verifier: decides how many tokens the target verifies, and whether in a tree.
    """
    loop = Loop(gamma=gamma, max_decode_len=max_decode_len, verifier=verifier)
    timed = Timed.half_way(target, draft, inputs, settings, loop)
    programs = timed.target_calls(1), timed.proposals(), timed.target_calls(loop.num_nodes)
    one, drafts, verification = np.median(interleaved(programs, 9), axis=0).tolist()
    return StepTimes(target=1e3 * one, draft=1e3 * drafts / gamma, verification=1e3 * verification)
