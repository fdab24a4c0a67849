"""Predictions from made-up figures whose speed-up is known."""

import dataclasses

import numpy as np
import pytest

from spec_t5x import theory
from spec_t5x.errors import InputError
from spec_t5x.tuning.options import TuningOptions
from spec_t5x.tuning.prediction import Prediction, best_of, choose, choose_at, predict
from tests.tuning.figures import LARGEST, made_up, random_texts, rows_of

TUNING = TuningOptions(resamples=60)


def predicted(measurement, tuning=TUNING) -> dict[tuple, Prediction]:
    return {(p.draft, p.gamma, p.batch_size): p for p in predict(measurement, tuning)}


@pytest.mark.parametrize(("alpha", "c"), [(0.6, 0.05), (0.9, 0.2)])
def test_at_batch_size_1_it_is_theorem_3_8(alpha, c):
    """With the acceptance rate of the sample; texts end within an iteration, hence a percent."""

    def cost(width):
        return 1 + 0.02 * (width - 1)

    found = predicted(made_up({"a": (rows_of(random_texts(alpha)), c)}, target=cost))
    for gamma in (1, 3, 7, LARGEST):
        p = found["a", gamma, 1]
        expected = theory.wall_time_improvement(alpha, gamma, c, cost(gamma + 1))
        assert p.speed_up == pytest.approx(expected, rel=0.03)
        assert p.low <= p.speed_up <= p.high
        assert (p.c, p.verification_cost) == pytest.approx((c, cost(gamma + 1)))
        assert p.iteration == pytest.approx(1e3 * (gamma * c + cost(gamma + 1)))
        assert p.costs.c == pytest.approx(c)
    assert found[None, 0, 1].speed_up == 1.0


def test_the_best_gamma_is_theorys():
    alpha, c = 0.75, 0.1
    measurement = made_up({"a": (rows_of(random_texts(alpha)), c)})
    (best,) = best_of(predict(measurement, TUNING))
    assert abs(best.gamma - theory.optimal_gamma(alpha, c, max_gamma=LARGEST)) <= 1
    betas = measurement.traces["a"].by_position()
    assert abs(best.gamma - theory.optimal_gamma_by_position(betas, c)) <= 1


def test_set_up_and_overhead_are_counted_once_and_found_again():
    """4 plain steps against one iteration of 1 + 3 x (0.1 + 0.2), set-ups of 2 and 2 + 1."""
    costs = {"setup": 2.0, "draft_setup": 1.0, "overhead": 0.2}
    found = predicted(made_up({"a": (rows_of(["1111"] * 9), 0.1)}, **costs))
    p = found["a", 3, 1]
    assert p.speed_up == pytest.approx((2 + 4) / (3 + 1 + 0.3 + 0.6))
    assert (p.plain_setup, p.setup, p.overhead) == pytest.approx((2000, 3000, 600))
    assert dataclasses.astuple(p.costs) == pytest.approx((0.1, 1.6, 1.0))
    assert p.tokens_per_second == pytest.approx(4 / (3 + 1 + 0.3 + 0.6))


def test_a_batch_lasts_until_its_last_row():
    """Rows of 4 tokens, right and wrong: alone 1 and 4 iterations, together 4."""
    rows = rows_of(["1111", "0000"] * 6)
    found = predicted(made_up({"a": (rows, 0.1)}, batch_sizes=(1, 2)))
    each = 1 + 3 * 0.1
    assert found["a", 3, 1].speed_up == pytest.approx(8 / (5 * each))
    assert found["a", 3, 2].speed_up == pytest.approx(4 / (4 * each))
    assert found["a", 3, 2].block_efficiency == pytest.approx(8 / 5)


def test_a_draft_that_often_has_nothing_to_say_is_verified_as_short():
    """Nothing is proposed: each iteration is a plain step and the draft's time."""

    def cost(width):
        return float(width)

    rows = rows_of(["0000"] * 9, proposed=[[0] * 4] * 9)
    found = predicted(made_up({"copy": (rows, 0.1)}, target=cost, varying=["copy"]))
    assert found["copy", 4, 1].speed_up == pytest.approx(1 / 1.4)
    assert found["copy", 4, 1].verification_cost == pytest.approx(5.0)


def test_a_hopeless_draft_is_not_chosen_and_a_free_perfect_one_with_all_its_drafts():
    hopeless = predict(made_up({"a": (rows_of(["0" * 64] * 9), 0.1)}), TUNING)
    assert choose(hopeless, 0.05).gamma == 0
    assert max(p.speed_up for p in hopeless if p.gamma) < 1
    free = predict(made_up({"a": (rows_of(["1" * 64] * 9), 0.0)}), TUNING)
    assert choose(free, 0.05).gamma == LARGEST
    assert choose(free, 0.05).speed_up == pytest.approx(16.0)


def test_the_choice_is_by_the_lower_end_and_a_margin():
    # A gain of a few percent: 64 tokens in 33 iterations of 1.8 steps.
    slight = predict(made_up({"a": (rows_of(["01" * 32] * 9), 0.8)}), TUNING)
    gain = choose(slight, 0.0).low
    assert gain == pytest.approx(64 / (33 * 1.8))
    assert choose(slight, gain - 1 - 1e-6).gamma == 1
    assert choose(slight, gain - 1 + 1e-6).gamma == 0
    # Good on average, and not to be relied on.
    unsure = predict(made_up({"a": (rows_of(["1" * 64, "0" * 64] * 5), 0.05)}), TUNING)
    assert max(p.speed_up for p in unsure) > 1.3
    assert choose(unsure, 0.05).gamma == 0


def test_of_several_batch_sizes_the_fastest_is_chosen():
    rows = rows_of(random_texts(0.8, num=16, length=64))
    predictions = predict(made_up({"a": (rows, 0.05)}, batch_sizes=(1, 4)), TUNING)
    assert choose(predictions, 0.05).batch_size == 4
    assert choose_at(predictions, 1, 0.05).batch_size == 1
    assert {(p.draft, p.batch_size) for p in best_of(predictions)} == {("a", 1), ("a", 4)}
    with pytest.raises(InputError, match="nothing was predicted"):
        choose([], 0.05)


def width_of(p: Prediction) -> float:
    return p.high - p.low


def test_intervals_are_wider_for_fewer_inputs_and_for_timings_that_scatter():
    def interval(num, noise=0.0):
        rows = rows_of(random_texts(0.7, num=num, length=40))
        return predicted(made_up({"a": (rows, 0.1)}, noise=noise))["a", 4, 1]

    many, few, scattered = interval(40), interval(10), interval(40, noise=0.2)
    assert width_of(many) < width_of(few)
    assert 1.5 * width_of(many) < width_of(scattered)


def test_one_text_leaves_much_open():
    rows = rows_of(random_texts(0.7, num=1, length=40))
    p = predicted(made_up({"a": (rows, 0.1)}))["a", 4, 1]
    assert p.low < 0.95 * p.speed_up and p.high > 1.05 * p.speed_up


def test_intervals_hold_what_other_texts_give():
    """In 95 of 100 samples; fewer than 9 of 12 is left to chance once in 4000 times."""
    truth = theory.wall_time_improvement(0.7, 3, 0.1)
    hits = 0
    for seed in range(12):
        rows = rows_of(random_texts(0.7, num=12, length=100, seed=seed))
        p = predicted(made_up({"a": (rows, 0.1)}))["a", 3, 1]
        hits += p.low <= truth <= p.high
    assert hits >= 9


def test_equal_seeds_give_equal_intervals():
    measurement = made_up({"a": (rows_of(random_texts(0.7, num=9, length=40)), 0.1)}, noise=0.1)
    ours, again = (predict(measurement, TUNING) for _ in range(2))
    assert ours == again
    other = predict(measurement, dataclasses.replace(TUNING, seed=1))
    assert [p.low for p in other if p.gamma] != [p.low for p in ours if p.gamma]
    assert np.allclose([p.speed_up for p in other], [p.speed_up for p in ours])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 0.0}, "budget is 0.0"),
        ({"num_inputs": 0}, "num_inputs is 0"),
        ({"max_gamma": 0}, "max_gamma is 0"),
        ({"confidence": 1.0}, "confidence is 1.0"),
        ({"margin": -0.1}, "margin is -0.1"),
        ({"timed_gammas": (0,)}, "timed_gammas hold 0"),
        ({"probes": (0,)}, "probes hold 0"),
        ({"probes": ()}, "probes are empty"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_options_are_checked(changes, message):
    with pytest.raises(InputError, match=message):
        TuningOptions(**changes)
