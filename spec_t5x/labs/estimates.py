"""Acceptance rates from measured betas: means, and their confidence intervals.

Beta is the chance that a draft is accepted at one *place*, a position of a text. Betas of one text
depend on one another and say less than as many independent draws, so the intervals come from a
bootstrap over whole texts: texts drawn with replacement, as many as there are, make one resample,
and the interval holds the middle ``confidence`` of the resamples' means (Efron 1979).
"""

import dataclasses

import numpy as np

from spec_t5x.errors import InputError, check_at_least
from spec_t5x.options import check_types
from spec_t5x.types import Array, Float, Int, Integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Settings of intervals; equal settings give equal intervals."""

    # Share of the resampled means that the interval holds.
    confidence: float = 0.95
    resamples: int = 1000
    seed: int = 0

    def __post_init__(self):
        check_types(self)
        if not 0 < self.confidence < 1:
            raise InputError(f"confidence is {self.confidence}: give a number between 0 and 1")
        check_at_least(self, resamples=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over the places of texts, and its interval."""

    value: float
    # Bounds of the interval; None for fewer than two texts, which cannot be resampled.
    low: float | None
    high: float | None
    # Number of places that the mean is over, and number of texts that have one.
    count: int
    num_texts: int

    def __format__(self, form: str) -> str:
        """Formats the value with its interval, if any: "0.750 (0.700-0.800)" for ".3f"."""
        value, *ends = (
            format(each, form) for each in (self.value, self.low, self.high) if each is not None
        )
        return f"{value} ({'-'.join(ends)})" if ends else value


def mean(
    betas: Float[Array, "places"], texts: Int[Array, "places"], bootstrap: Bootstrap
) -> Estimate | None:
    """Returns alpha, the mean of beta over places (Corollary 3.6), or None if there is no place.

    ``texts`` has the index, from 0, of the text that each place is in.
    """
    return ratio(np.bincount(texts, weights=betas), np.bincount(texts), bootstrap)


def ratio(
    sums: Float[np.ndarray, "texts"] | Integer[np.ndarray, "texts"],
    counts: Integer[Array, "texts"],
    bootstrap: Bootstrap,
) -> Estimate | None:
    """Returns ``sum(sums) / sum(counts)`` with its interval, or None if all counts are 0.

    An example is the acceptance rate: ``DecodeStats.accepted`` over ``verified`` of each text.
    Texts whose count is 0 are left out.
    """
    pairs = np.stack([sums, counts], axis=1).astype(np.float64)
    pairs = pairs[pairs[:, 1] > 0]
    if not len(pairs):
        return None
    total, count = pairs.sum(axis=0)
    low = high = None
    if len(pairs) > 1:
        means = _resampled(pairs, bootstrap)
        outside = (1 - bootstrap.confidence) / 2
        low, high = np.quantile(means, [outside, 1 - outside]).tolist()
    return Estimate(
        value=float(total / count), low=low, high=high, count=int(count), num_texts=len(pairs)
    )


def _resampled(pairs: Float[np.ndarray, "texts 2"], bootstrap: Bootstrap) -> np.ndarray:
    """Returns the mean ``[resamples]`` of each resample, from each text's sum and count."""
    rng = np.random.default_rng(bootstrap.seed)
    num, means = len(pairs), []
    # 64 resamples at a time bound the memory.
    for start in range(0, bootstrap.resamples, 64):
        rows = min(64, bootstrap.resamples - start)
        weights = rng.multinomial(num, np.full(num, 1 / num), size=rows)
        sums, counts = (weights @ pairs).T
        means.append(sums / counts)
    return np.concatenate(means)
