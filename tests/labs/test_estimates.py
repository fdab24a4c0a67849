"""Tests of means of betas and their intervals, which are bootstrapped over texts."""

import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.estimates import Bootstrap, mean, ratio

BOOTSTRAP = Bootstrap(resamples=400, seed=3)


def test_the_mean_is_over_places_whatever_the_texts():
    betas, texts = np.array([1.0, 0.5, 0.0, 0.0]), np.array([0, 0, 0, 1])
    estimate = mean(betas, texts, BOOTSTRAP)
    assert estimate.value == 0.375
    assert (estimate.count, estimate.num_texts) == (4, 2)
    # Resamples of two texts: (0, 0), (0, 1) and (1, 1), each of which occurs.
    assert (estimate.low, estimate.high) == (0.0, 0.5)


def test_of_nothing_there_is_no_mean_and_of_one_text_no_interval():
    none = np.zeros(0)
    assert mean(none, none.astype(int), BOOTSTRAP) is None
    assert ratio(np.array([0, 0]), np.array([0, 0]), BOOTSTRAP) is None
    alone = mean(np.array([0.2, 0.4]), np.array([0, 0]), BOOTSTRAP)
    assert alone.value == pytest.approx(0.3)
    assert alone.low is None and alone.high is None


def test_intervals_hold_the_true_mean_as_often_as_they_say():
    """Intervals over independent tokens would not."""
    over_texts, over_tokens, trials = 0, 0, 100
    for seed in range(trials):
        # Betas of mean 0.6 that differ between texts more than within one.
        rng = np.random.default_rng(seed)
        levels = np.repeat(rng.uniform(0.3, 0.9, 60), 20)
        betas = np.clip(levels + rng.normal(scale=0.05, size=levels.size), 0, 1)
        interval = mean(betas, np.repeat(np.arange(60), 20), BOOTSTRAP)
        over_texts += interval.low <= 0.6 <= interval.high
        over_tokens += abs(betas.mean() - 0.6) < 1.96 * betas.std() / np.sqrt(betas.size)
    # 95%, within four standard errors of that many trials.
    assert over_texts / trials == pytest.approx(0.95, abs=4 * np.sqrt(0.95 * 0.05 / trials))
    assert over_tokens / trials < 0.6


def test_intervals_of_many_texts_are_those_of_a_normal_mean():
    values = np.random.default_rng(0).normal(0.6, 0.1, 400)
    error = values.std() / np.sqrt(values.size)

    def bounds(**settings):
        estimate = ratio(10 * values, np.full(400, 10), Bootstrap(**settings))
        return estimate.low, estimate.high

    for settings, width in (({}, 1.96), ({"confidence": 0.5}, 0.674)):
        expected = values.mean() - width * error, values.mean() + width * error
        assert bounds(resamples=10_000, **settings) == pytest.approx(expected, abs=0.1 * error)
    assert bounds(seed=1) == bounds(seed=1) != bounds(seed=2)
    low, high = bounds(resamples=1)
    assert low == high


def test_a_ratio_is_of_sums():
    # 3 of 4 and 0 of 1 accepted; the third text had no draft.
    estimate = ratio(np.array([3, 0, 0]), np.array([4, 1, 0]), BOOTSTRAP)
    assert estimate.value == 0.6
    assert (estimate.count, estimate.num_texts) == (5, 2)


@pytest.mark.parametrize(("name", "value"), [("confidence", 1.0), ("resamples", 0), ("seed", -1)])
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(InputError, match=f"{name} is {value}"):
        Bootstrap(**{name: value})
