"""Pearson's chi-square test of counts against a distribution."""

import numpy as np
from scipy import stats


def follows(counts, law) -> bool:
    """Returns True if ``counts`` fit the probabilities ``law`` at a significance level of 1e-6."""
    counts, law = np.asarray(counts), np.asarray(law, np.float64)
    # Outcomes rarer than 1e-12 come from rounding to float32 and are never drawn.
    possible = law > 1e-12
    if counts[~possible].any():
        return False
    counts, expected = counts[possible], counts.sum() * law[possible]
    threshold = stats.chi2.ppf(1 - 1e-6, max(len(expected) - 1, 1))
    return np.sum((counts - expected) ** 2 / expected) <= threshold
