"""Acceptance rates from measured betas: means, and how sure one can be of them.

Betas of one text depend on one another (an easy sentence is easy throughout), so that ten
thousand tokens say less than ten thousand independent draws would. Intervals are therefore
bootstrapped over whole texts: as many texts as there are, drawn with replacement, make one
resample, and the interval holds the middle ``confidence`` of the resamples' means (Efron
1979; the percentile method, on clusters).

All functions take arrays on the host, one number for each place of a text where a draft
stood, and the text that it belongs to.
"""

import dataclasses

import numpy as np

from spec_t5x.errors import InputError, check_at_least
from spec_t5x.types import Array, Float, Int, Integer

# Resamples whose weights are held in memory at once.
_AT_ONCE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """How intervals are made. Equal settings give equal intervals."""

    # Share of the resamples that the interval holds.
    confidence: float = 0.95
    resamples: int = 1000
    seed: int = 0

    def __post_init__(self):
        if not 0 < self.confidence < 1:
            raise InputError(f"confidence is {self.confidence}: give a number between 0 and 1")
        check_at_least(self, resamples=1, seed=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over places, and its interval."""

    value: float
    # None with fewer than two texts, which cannot be resampled.
    low: float | None
    high: float | None
    # Places that the mean is over, and texts that they are in.
    count: int
    num_texts: int


def mean(
    betas: Float[Array, "places"], texts: Int[Array, "places"], bootstrap: Bootstrap
) -> Estimate | None:
    """alpha: the mean of beta over places (Corollary 3.6), None of no place.

    Args:
      betas: at each place, how likely a draft is to be accepted there.
      texts: the number of the text that each place is in, from 0.
      bootstrap: how the interval is made.
    """
    if not betas.size:
        return None
    sums = np.bincount(texts, weights=betas)
    return ratio(sums, np.bincount(texts), bootstrap)


def ratio(
    sums: Float[np.ndarray, "texts"] | Integer[np.ndarray, "texts"],
    counts: Integer[Array, "texts"],
    bootstrap: Bootstrap,
) -> Estimate | None:
    """The sum of ``sums`` over that of ``counts``, None where nothing was counted.

    Such as ``DecodeStats.accepted`` over ``verified``, of each text. Texts without any
    count take no part.
    """
    there = np.asarray(counts) > 0
    pairs = np.stack([np.asarray(sums)[there], np.asarray(counts)[there]], 1).astype(np.float64)
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
    """The mean of each resample: how often each text was drawn, times its sum and count."""
    rng = np.random.default_rng(bootstrap.seed)
    num, means = len(pairs), []
    for start in range(0, bootstrap.resamples, _AT_ONCE):
        rows = min(_AT_ONCE, bootstrap.resamples - start)
        weights = rng.multinomial(num, np.full(num, 1 / num), size=rows)
        sums, counts = (weights @ pairs).T
        means.append(sums / counts)
    return np.concatenate(means)
