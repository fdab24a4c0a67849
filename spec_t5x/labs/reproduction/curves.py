"""Figures 2, 3 and 4: the curves of the paper's formulas."""

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from spec_t5x.labs.reproduction.contents import Exhibit, Origin, ReportFigure
from spec_t5x.labs.reproduction.plots import new_figure
from spec_t5x.labs.theory import formulas

# Values of gamma for which the paper draws its curves, and values of c of Figure 3.
GAMMAS = (1, 3, 5, 7, 10)
CS = (0.01, 0.02, 0.05, 0.1, 0.2)
_ALPHAS = np.linspace(0.0, 1.0, 201)
# Towards alpha = 1 the best gamma grows without bound.
_ALPHAS_FOR_GAMMA = np.linspace(0.0, 0.95, 191)

_ALPHA_LABEL = "α, the acceptance rate"
# Size of a figure in inches; the report's page is as wide.
_SIZE = {"width": 11.0, "height": 5.2}


def _figure(name: str, caption: str, plot: Figure) -> ReportFigure:
    return ReportFigure(name=name, caption=caption, origins=(Origin.CLOSED_FORM,), plot=plot)


def _draw_by_gamma(
    curve: Callable[[np.ndarray, int], np.ndarray], *, label: str, title: str, bound: bool = False
) -> Figure:
    """Draws ``curve(alphas, gamma)`` for each gamma; ``bound`` adds the limit 1 / (1 - alpha)."""
    figure, axes = new_figure(_ALPHA_LABEL, label, **_SIZE)
    for gamma in GAMMAS:
        axes.plot(_ALPHAS, curve(_ALPHAS, gamma), label=f"γ = {gamma}")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    if bound:
        inner = _ALPHAS[_ALPHAS < 1]
        infinite = formulas.oracle_improvement(inner, 0.0)
        axes.plot(inner, infinite, color="#888888", linestyle=":", label="γ = ∞")
        axes.set_ylim(0.8, max(GAMMAS) + 1.2)
    figure.legend(title=title, loc="outside right", frameon=False)
    return figure


def _figure_2(*_) -> list[ReportFigure]:
    label = "expected tokens per iteration"
    plot = _draw_by_gamma(formulas.expected_tokens, label=label, title="Equation 1", bound=True)
    caption = (
        "Tokens that one iteration of Algorithm 1 generates: Equation 1, "
        "(1 − α^(γ+1)) / (1 − α), and, dotted, its bound 1 / (1 − α) (section 3.5)."
    )
    return [_figure("figure2", caption, plot)]


def _figure_3(*_) -> list[ReportFigure]:
    plot, axes = new_figure(_ALPHA_LABEL, "optimal γ", **_SIZE)
    for c in CS:
        gammas = formulas.optimal_gamma(_ALPHAS_FOR_GAMMA, c)
        axes.step(_ALPHAS_FOR_GAMMA, gammas, where="mid", label=f"c = {c:g}")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    plot.legend(title="Theorem 3.8", loc="outside right", frameon=False)
    caption = (
        "The γ that maximizes Theorem 3.8, found by trying every γ (section 3.5); 0, plain "
        "decoding, where α is not above c (Corollary 3.9)."
    )
    return [_figure("figure3", caption, plot)]


def _figure_4(*_) -> list[ReportFigure]:
    speed = _draw_by_gamma(
        lambda alphas, gamma: formulas.wall_time_improvement(alphas, gamma, 0.0),
        label="speed-up, ×",
        title="Theorem 3.8, c = 0",
    )
    operations = _draw_by_gamma(
        lambda alphas, gamma: formulas.operations_factor(alphas, gamma, 0.0),
        label="arithmetic operations, ×",
        title="Theorem 3.11, ĉ = 0",
    )
    return [
        _figure(
            "figure4_speed",
            "Speed-up over plain decoding by Theorem 3.8, c = 0. The paper draws this and the "
            "next into one.",
            speed,
        ),
        _figure(
            "figure4_operations",
            "Arithmetic operations over plain decoding's by Theorem 3.11, ĉ = 0.",
            operations,
        ),
    ]


FIGURE_2 = Exhibit("Figure 2. Expected number of generated tokens as a function of α", _figure_2)
FIGURE_3 = Exhibit("Figure 3. The optimal γ as a function of α for various values of c", _figure_3)
FIGURE_4 = Exhibit(
    "Figure 4. Speed-up and the increase in arithmetic operations as a function of α", _figure_4
)
