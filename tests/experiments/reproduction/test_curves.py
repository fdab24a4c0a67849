"""Figures 2, 3 and 4: what their lines and points are."""

import numpy as np
import pytest

from spec_t5x.experiments.reproduction.closed_forms import no_parts
from spec_t5x.experiments.reproduction.curves import (
    COSTS,
    GAMMAS,
    figure_2,
    figure_3,
    figure_4,
    quickest,
)
from spec_t5x.experiments.reproduction.items import Setting
from spec_t5x.experiments.reproduction.measured_rows import measured_rows
from spec_t5x.experiments.reproduction.sections import Origin, Plot
from spec_t5x.theory import formulas


def plots(item, done):
    section = item.render(Setting(), done)
    return section, [content for content in section.content if isinstance(content, Plot)]


def lines(plot):
    """Label to data of the drawn curves, and the single points."""
    (axes,) = plot.draw().axes
    curves = {
        line.get_label(): line.get_xydata() for line in axes.lines if len(line.get_xdata()) > 1
    }
    points = [tuple(line.get_xydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
    return curves, points


@pytest.mark.parametrize(
    ("make", "formulas"),
    [
        (figure_2, [lambda a, g: sum(a**i for i in range(g + 1))]),
        (
            figure_4,
            [
                lambda a, g: sum(a**i for i in range(g + 1)),
                lambda a, g: (g + 1) / sum(a**i for i in range(g + 1)),
            ],
        ),
    ],
)
def test_curves_are_the_formulas(make, formulas):
    section, drawn = plots(make(no_parts), {})
    for plot, formula in zip(drawn, formulas, strict=True):
        curves, points = lines(plot)
        assert points == [] and plot.origins == (Origin.CLOSED_FORM,)
        for gamma in GAMMAS:
            alphas, values = curves[f"γ = {gamma}"].T
            assert alphas[0] == 0 and alphas[-1] == 1
            np.testing.assert_allclose(values, [formula(a, gamma) for a in alphas], rtol=1e-12)
    assert "no measured points" in section.finding


def test_the_bound_of_figure_2():
    _, (plot,) = plots(figure_2(no_parts), {})
    alphas, values = lines(plot)[0]["γ = ∞"].T
    np.testing.assert_allclose(values, 1 / (1 - alphas))


def test_the_optimal_gammas_of_figure_3_are_found_by_trying():
    section, (plot,) = plots(figure_3(no_parts), {})
    curves, _ = lines(plot)
    tried = np.arange(100)
    for c in COSTS:
        for alpha, gamma in curves[f"c = {c:g}"][::10]:
            factors = [(1 - alpha ** (g + 1)) / ((1 - alpha) * (g * c + 1)) for g in tried]
            assert factors[int(gamma)] >= max(factors) * (1 - 1e-12)
    table = section.content[1]
    assert [row[0] for row in table.rows] == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert table.rows[3][1 + COSTS.index(0.05)] == formulas.optimal_gamma(0.8, 0.05) == 8


def test_measured_points_are_drawn_over_the_curves(speed_ups):
    rows = measured_rows(speed_ups)
    expected = {
        figure_2: [[(row.alpha, row.accepted_plus_one) for row in rows]],
        figure_4: [
            [(row.alpha, row.speed_up) for row in rows],
            [(row.alpha, (row.gamma + 1) / row.block_efficiency) for row in rows],
        ],
        figure_3: [[(row.alpha, row.gamma) for row in quickest(rows)]],
    }
    for make, of_plots in expected.items():
        section, drawn = plots(make(no_parts), speed_ups)
        for plot, points in zip(drawn, of_plots, strict=True):
            curves, found = lines(plot)
            assert sorted(found) == sorted(points)
            assert Origin.MEASURED in plot.origins and plot.parts == ("table2/made-up",)
        assert "measured" in section.finding
    # A measured gamma that the paper does not draw has its curve, too.
    assert "γ = 2" in lines(plots(figure_2(no_parts), speed_ups)[1][0])[0]


def test_the_quickest_gamma_needs_a_choice(speed_ups):
    rows = measured_rows(speed_ups)
    best = quickest(rows)
    assert len(best) == 4
    for row in best:
        others = [other.speed_up for other in rows if other.setting == row.setting]
        assert row.speed_up == max(others) and len(others) == 3
    assert quickest(rows[:1]) == []
    section, _ = plots(figure_3(no_parts), speed_ups)
    # The made-up speed-ups are a fixed share of the expectation with T(m).
    assert "in 4 of 4 settings" in section.finding
    assert section.content[2].parts == ("table2/made-up",)
