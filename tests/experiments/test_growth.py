"""How cost grows: the model behind the curves, and a run at one point."""

import dataclasses
import json

import numpy as np
import pytest

from spec_t5x.cli.settings import Models
from spec_t5x.errors import InputError
from spec_t5x.experiments import growth
from spec_t5x.experiments.growth import GrowthOptions, Point, Row
from spec_t5x.models.sizes import size
from spec_t5x.theory import formulas

pytestmark = pytest.mark.usefixtures("quick_compilation")

MIDDLE = Point(batch=1, length=64, gamma=4)


def row(speed_up=1.0, c=0.1, verification=1.4, **where):
    return Row(
        pair="own",
        point=dataclasses.replace(MIDDLE, **where),
        middle=MIDDLE,
        alpha=0.7,
        plain_seconds=[speed_up * 2, speed_up * 2, 9.0],
        speculative_seconds=[2.0, 2.0, 8.0],
        plain_setup=0.1,
        speculative_setup=0.1,
        iterations=20,
        target_step=1.0,
        c=c,
        verification=verification,
    )


def test_iterations_of_two_tokens_by_hand():
    """gamma 1, alpha 1/2: two tokens take one iteration or two, equally often.

    The slower of two rows takes one only if both do.
    """
    assert growth.expected_iterations(0.5, 1, 2, 1) == pytest.approx(1.5)
    assert growth.expected_iterations(0.5, 1, 2, 2) == pytest.approx(1.75)


def test_iterations_of_certain_drafts_and_of_hopeless_ones():
    assert growth.expected_iterations(1.0, 3, 10, 8) == pytest.approx(3)
    assert growth.expected_iterations(0.0, 3, 10, 8) == pytest.approx(10)


def test_iterations_are_those_of_simulated_rows():
    alpha, gamma, length, batch = 0.7, 4, 40, 8
    rng = np.random.default_rng(0)
    accepted = np.cumprod(rng.random((4000, batch, length, gamma)) < alpha, axis=-1).sum(axis=-1)
    written = np.cumsum(1 + accepted, axis=-1)
    iterations = 1 + np.sum(written < length, axis=-1).max(axis=-1)
    error = 4 * iterations.std() / np.sqrt(len(iterations))
    expected = growth.expected_iterations(alpha, gamma, length, batch)
    assert abs(iterations.mean() - expected) < error


def test_a_long_text_of_one_row_takes_what_the_theorem_says():
    long = row(length=4096)
    expected = formulas.wall_time_improvement(0.7, 4, 0.1, 1.4)
    assert long.predicted == pytest.approx(expected, rel=2e-3)
    assert row(length=4096, batch=32).predicted < long.predicted


def test_the_best_gamma_is_none_where_the_draft_is_as_slow_as_the_target():
    assert row(c=0.1).best_gamma > row(c=0.3).best_gamma > 0
    assert row(c=1.0).best_gamma == 0


def test_where_a_curve_falls_through_1():
    assert growth.crossing([1, 2, 4], [1.5, 1.25, 0.75]) == pytest.approx(2 * np.sqrt(2))
    assert growth.crossing([1, 2, 4], [0.5, 1.25, 1.0]) is None
    assert growth.crossing([1, 2], [0.9, 0.8]) is None


def test_all_points_are_one_step_from_the_middle():
    options = GrowthOptions(batches=(1, 8), lengths=(32, 128), gammas=(2, 4))
    points = options.points()
    middle = points[0]
    assert middle == Point(batch=1, length=128, gamma=4)
    assert points == [
        middle,
        dataclasses.replace(middle, batch=8),
        dataclasses.replace(middle, length=32),
        dataclasses.replace(middle, gamma=2),
    ]


def test_the_table_and_the_figure_have_every_walk():
    rows = [row(1.5), row(0.5, batch=4), row(1.4, length=8), row(1.2, gamma=8)]
    assert growth.walk(rows, "own", "batch") == [rows[0], rows[1]]
    assert growth.walk(rows, "own", "length") == [rows[2], rows[0]]
    table = growth.table(rows)
    assert "own, batch: stops paying at 2.0 measured" in table
    assert "| own | 1 | 64 | 8 | 0.100 | 1.40 |" in table
    kept = json.loads(json.dumps(growth.to_dict(rows)))
    assert kept["crossings"]["own"]["batch"]["measured"] == pytest.approx(2.0)
    panels = growth.draw(rows).axes
    assert [len(panel.lines[0].get_xdata()) for panel in panels] == [2, 2, 2]


def test_the_draft_of_random_weights_is_much_smaller():
    ours, target = growth.small_draft(size("t5_1_1_small")), size("t5_1_1_small")
    assert ours.vocab_size == target.vocab_size
    assert ours.num_decoder_layers * ours.emb_dim < target.num_decoder_layers * target.emb_dim / 8


def test_a_point_is_measured(tiny_pair):
    options = GrowthOptions(
        pairs=("own",),
        length=6,
        gamma=2,
        batches=(1,),
        lengths=(6,),
        gammas=(2,),
        alpha=1.0,
        source_len=4,
        repeats=1,
        step_repeats=3,
    )
    models = Models(target=str(tiny_pair / "target"), draft=str(tiny_pair / "draft"))
    (found,) = growth.run(options, models=models)
    # All accepted: three tokens an iteration.
    assert found.iterations == 2
    assert min(found.c, found.verification, found.target_step) > 0
    assert "| own | 1 | 6 | 2 |" in growth.table([found])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batches": (0,)}, "batches is 0: give whole numbers from 1"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"pairs": ("t5_huge",)}, "no T5 size is called 't5_huge'"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        GrowthOptions(**wrong)
