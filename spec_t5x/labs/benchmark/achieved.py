"""Acceptance that speculative decoding counted: sums over outputs, with intervals over texts."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec_t5x.generation import Generation
from spec_t5x.labs import estimates
from spec_t5x.labs.estimates import Bootstrap, Estimate
from spec_t5x.labs.theory.formulas import conditional_acceptance
from spec_t5x.types import Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Achieved:
    """Acceptance counted while texts were decoded speculatively, with intervals over texts."""

    num_texts: int
    target_calls: int
    # Generated tokens for each target call.
    block_efficiency: Estimate
    # Mean of beta, the chance that a draft is accepted, over verified drafts; None without any.
    alpha: Estimate | None
    # Share of the verified drafts that were accepted; None if none were verified.
    observed: Estimate | None
    # The same share for the i-th draft of a proposal, i below gamma; 0 if none were verified.
    acceptance_by_position: list[float]


def achieved(
    outputs: Sequence[Generation],
    texts: Int[np.ndarray, "outputs"] | None = None,
    bootstrap: Bootstrap | None = None,
) -> Achieved:
    """Sums up the acceptance counted in at least one output that was decoded with a draft.

    The bootstrap resamples outputs of equal ``texts`` together; None resamples each by itself.
    """
    bootstrap = bootstrap or Bootstrap()
    texts = np.arange(len(outputs)) if texts is None else texts
    accepted, verified = (
        np.array([getattr(output, name) for output in outputs])
        for name in ("accepted_by_position", "verified_by_position")
    )
    # Rounding takes the alpha of a draft that equals the target above 1.
    alphas = np.array([min(output.alpha or 0.0, 1.0) for output in outputs])
    calls = np.array([output.target_calls for output in outputs])
    # Tokens beyond a stop string count, since they were computed.
    lengths = np.array([round(o.block_efficiency * o.target_calls) for o in outputs])

    def ratio(sums: np.ndarray, counts: np.ndarray) -> Estimate | None:
        sums, counts = (np.bincount(texts, weights=each) for each in (sums, counts))
        return estimates.ratio(sums, counts.astype(np.int64), bootstrap)

    by_position = conditional_acceptance(accepted.sum(axis=0), verified.sum(axis=0))
    return Achieved(
        num_texts=len(outputs),
        target_calls=int(calls.sum()),
        block_efficiency=ratio(lengths, calls),
        alpha=ratio(alphas * verified.sum(axis=1), verified.sum(axis=1)),
        observed=ratio(accepted.sum(axis=1), verified.sum(axis=1)),
        acceptance_by_position=by_position.tolist(),
    )
