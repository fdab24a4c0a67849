"""Figures 2, 3 and 4: their curves."""

import numpy as np
import pytest

from spec_t5x.labs.reproduction.contents import Origin
from spec_t5x.labs.reproduction.curves import CS, FIGURE_2, FIGURE_3, FIGURE_4, GAMMAS


def curves_of(figure):
    """Returns the data of the drawn curves by label, and draws the figure."""
    figure.plot.draw_without_rendering()
    (axes,) = figure.plot.axes
    # Curves take most of a page.
    assert axes.get_window_extent().width / figure.plot.bbox.width > 0.7
    assert figure.plot.get_figwidth() == 11
    return {line.get_label(): line.get_xydata() for line in axes.lines}


def tokens(alpha, gamma):
    return sum(alpha**i for i in range(gamma + 1))


@pytest.mark.parametrize(
    ("item", "formulas"),
    [(FIGURE_2, [tokens]), (FIGURE_4, [tokens, lambda a, g: (g + 1) / tokens(a, g)])],
)
def test_curves_are_the_formulas(content, item, formulas):
    for figure, formula in zip(content(item, {}), formulas, strict=True):
        assert figure.origins == (Origin.CLOSED_FORM,)
        curves = curves_of(figure)
        for gamma in GAMMAS:
            alphas, values = curves[f"γ = {gamma}"].T
            assert alphas[0] == 0 and alphas[-1] == 1
            np.testing.assert_allclose(values, [formula(a, gamma) for a in alphas], rtol=1e-12)


def test_the_optimal_gammas_of_figure_3_are_found_by_trying(content):
    (figure,) = content(FIGURE_3, {})
    curves, tried = curves_of(figure), np.arange(100)
    for c in CS:
        for alpha, gamma in curves[f"c = {c:g}"][::10]:
            factors = [(1 - alpha ** (g + 1)) / ((1 - alpha) * (g * c + 1)) for g in tried]
            assert factors[int(gamma)] >= max(factors) * (1 - 1e-12)
