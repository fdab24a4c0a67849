"""Pearson's test of counts against a law, with a threshold that follows from their number."""

import numpy as np
from scipy import stats


def follows(counts, law) -> bool:
    """Tells whether counts of outcomes follow a law, wrongly once in a million times."""
    counts, law = np.asarray(counts), np.asarray(law, np.float64)
    # Rounding to float32 lets pass what is rarer than any draw.
    possible = law > 1e-12
    if counts[~possible].any():
        return False
    counts, expected = counts[possible], counts.sum() * law[possible]
    threshold = stats.chi2.ppf(1 - 1e-6, max(len(expected) - 1, 1))
    return np.sum((counts - expected) ** 2 / expected) <= threshold
