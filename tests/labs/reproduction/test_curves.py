"""Figures 2, 3 and 4: their lines and points."""

import numpy as np
import pytest

from spec_t5x.labs.reproduction.contents import Origin
from spec_t5x.labs.reproduction.curves import CS, FIGURE_2, FIGURE_3, FIGURE_4, GAMMAS, fastest
from spec_t5x.labs.reproduction.speed_ups import RUNS


def lines(figure):
    """Returns the data of the drawn curves by label, and the single points."""
    (axes,) = figure.plot.axes
    curves = {
        line.get_label(): line.get_xydata() for line in axes.lines if len(line.get_xdata()) > 1
    }
    points = [tuple(line.get_xydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
    return curves, points


def tokens(alpha, gamma):
    return sum(alpha**i for i in range(gamma + 1))


@pytest.mark.parametrize(
    ("item", "formulas"),
    [(FIGURE_2, [tokens]), (FIGURE_4, [tokens, lambda a, g: (g + 1) / tokens(a, g)])],
)
def test_curves_are_the_formulas(content, item, formulas):
    for figure, formula in zip(content(item, {}), formulas, strict=True):
        curves, points = lines(figure)
        assert points == [] and figure.origins == (Origin.CLOSED_FORM,)
        assert "Points" not in figure.caption
        for gamma in GAMMAS:
            alphas, values = curves[f"γ = {gamma}"].T
            assert alphas[0] == 0 and alphas[-1] == 1
            np.testing.assert_allclose(values, [formula(a, gamma) for a in alphas], rtol=1e-12)


def test_the_optimal_gammas_of_figure_3_are_found_by_trying(content):
    (figure,) = content(FIGURE_3, {})
    curves, _ = lines(figure)
    tried = np.arange(100)
    for c in CS:
        for alpha, gamma in curves[f"c = {c:g}"][::10]:
            factors = [(1 - alpha ** (g + 1)) / ((1 - alpha) * (g * c + 1)) for g in tried]
            assert factors[int(gamma)] >= max(factors) * (1 - 1e-12)


def test_measured_points_are_drawn_over_the_curves(content, rows):
    found = {"table2/ende/transformer/t0": {"rows": rows}}
    expected = {
        FIGURE_2: [[(row["alpha"], row["accepted_plus_one"]) for row in rows]],
        FIGURE_4: [
            [(row["alpha"], row["speed_up"]) for row in rows],
            [(row["alpha"], (row["gamma"] + 1) / row["block_efficiency"]) for row in rows],
        ],
        FIGURE_3: [[(row["alpha"], row["gamma"]) for row in fastest(rows)]],
    }
    for item, of_figures in expected.items():
        for figure, points in zip(content(item, found), of_figures, strict=True):
            _, drawn = lines(figure)
            assert sorted(drawn) == sorted(points)
            assert Origin.MEASURED in figure.origins and "Points" in figure.caption
    # A measured gamma that the paper does not draw has its curve, too.
    assert "γ = 2" in lines(content(FIGURE_2, found)[0])[0]


def test_a_series_has_the_same_marker_in_every_figure(content, rows):
    runs = dict.fromkeys((pair.task, draft) for pair, draft, _ in RUNS)
    every = [row | {"task": task, "draft": draft} for task, draft in runs for row in rows[:3]]
    found = {"table2/ende/transformer/t0": {"rows": every}}
    markers = []
    for item in (FIGURE_2, FIGURE_3, FIGURE_4):
        for figure in content(item, found):
            (axes,) = figure.plot.axes
            named = [line for line in axes.lines if ", " in str(line.get_label())]
            markers.append({line.get_label(): line.get_marker() for line in named})
    assert len(markers[0]) == len({*markers[0].values()}) == len(runs) == 8
    assert all(each == markers[0] for each in markers)


def test_points_that_are_times_come_with_their_doubts(content, rows):
    def doubted(rows):
        found = {"table2/ende/transformer/t0": {"rows": rows}}
        figures = [f for item in (FIGURE_2, FIGURE_3, FIGURE_4) for f in content(item, found)]
        return ["Not to be relied on" in figure.caption for figure in figures]

    assert doubted(rows) == [False, True, True, False]
    assert not any(doubted([row | {"beside": 0.0, "noise": False} for row in rows]))


def test_the_fastest_gamma_needs_a_choice(rows):
    best = fastest(rows)
    assert len(best) == 4
    for row in best:
        setting = ("task", "draft", "temperature")
        others = [other for other in rows if all(other[k] == row[k] for k in setting)]
        assert row["speed_up"] == max(other["speed_up"] for other in others) and len(others) == 3
    assert fastest(rows[:1]) == []
