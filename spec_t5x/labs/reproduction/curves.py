"""Figures 2, 3 and 4: the paper's curves, with what Table 2 measured here over them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spec_t5x.labs.benchmark.reliability import caution
from spec_t5x.labs.reproduction import speed_ups
from spec_t5x.labs.reproduction.contents import Exhibit, Origin, ReportFigure, ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Measure
from spec_t5x.labs.reproduction.plots import COLOURS, MARKERS, new_figure
from spec_t5x.theory import formulas

Row = Mapping[str, Any]

# Values of gamma for which the paper draws its curves, and values of c of Figure 3.
GAMMAS = (1, 3, 5, 7, 10)
CS = (0.01, 0.02, 0.05, 0.1, 0.2)
_ALPHAS = np.linspace(0.0, 1.0, 201)
# Towards alpha = 1 the best gamma grows beyond all bounds.
_ALPHAS_FOR_GAMMA = np.linspace(0.0, 0.95, 191)

_ALPHA_LABEL = "α, the acceptance rate"
_GREY = "#444444"
# Inches: the report's page is as wide.
_SIZE = {"width": 11.0, "height": 5.2}
# By task and draft: one marker in all figures, of a quick run and of a full one.
_SERIES = dict.fromkeys((pair.task, draft) for pair, draft, _ in speed_ups.RUNS)
_MARKERS = dict(zip(_SERIES, MARKERS, strict=True))


def _figure(
    name: str, caption: str, points: str, rows: Sequence[Row], plot: Figure, *, timed: bool = False
) -> ReportFigure:
    """Makes a figure of formulas' curves; the caption explains the points of measured rows.

    If their places depend on time, it ends with doubts.
    """
    origins = (Origin.CLOSED_FORM,)
    if rows:
        doubts = caution(rows) if timed else None
        caption = (
            f"{caption} Points, hollow at temperature 0: {points}{doubts and ' ' + doubts or ''}"
        )
        origins += (Origin.MEASURED,)
    return ReportFigure(name=name, caption=caption, origins=origins, plot=plot)


def _plot_points(
    axes: Axes, rows: Sequence[Row], value: Callable[[Row], float], colour: Callable[[Row], str]
) -> list[Artist]:
    """Plots measured points, hollow at temperature 0; returns the handles of a legend."""
    handles = {}
    for row in rows:
        name, marker = f"{row['task']}, {row['draft']}", _MARKERS[row["task"], row["draft"]]
        if name not in handles:
            (handles[name],) = axes.plot([], [], marker, color=_GREY, ms=5, label=name)
        own = colour(row)
        face = own if row["temperature"] else "white"
        axes.plot(row["alpha"], value(row), marker, color=own, mfc=face, ms=6, zorder=4)
    return list(handles.values())


def _draw_by_gamma(
    rows: Sequence[Row],
    curve: Callable[[np.ndarray, int], np.ndarray],
    value: Callable[[Row], float],
    *,
    label: str,
    title: str,
    bound: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Figure:
    """Draws a curve over alpha for each gamma; the points of a gamma have its curve's colour."""
    figure, axes = new_figure(_ALPHA_LABEL, label, **_SIZE)
    gammas = sorted({*GAMMAS, *(row["gamma"] for row in rows)})
    colours = dict(zip(gammas, itertools.cycle(COLOURS), strict=False))
    lines = [
        axes.plot(_ALPHAS, curve(_ALPHAS, gamma), color=colour, label=f"γ = {gamma}")[0]
        for gamma, colour in colours.items()
    ]
    axes.set_ylim(bottom=0)
    if bound:
        inner = _ALPHAS[_ALPHAS < 1]
        lines += axes.plot(inner, bound(inner), color="#888888", linestyle=":", label="γ = ∞")
        axes.set_ylim(0.8, max(GAMMAS) + 1.2)
    axes.set_xlim(0, 1)
    points = _plot_points(axes, rows, value, lambda row: colours[row["gamma"]])
    figure.legend(handles=[*lines, *points], title=title, loc="outside right", frameon=False)
    return figure


def _figure_2(options: ReproduceOptions, results: Measure) -> list[ReportFigure]:
    rows = speed_ups.measure_all(options, results.kept)
    plot = _draw_by_gamma(
        rows,
        formulas.expected_tokens,
        lambda row: row["accepted_plus_one"],
        label="expected tokens per iteration",
        title="Equation 1",
        bound=lambda alphas: formulas.oracle_improvement(alphas, 0.0),
    )
    caption = (
        "Tokens that one iteration of Algorithm 1 generates: Equation 1, "
        "(1 − α^(γ+1)) / (1 − α), and its bound 1 / (1 − α) (section 3.5)."
    )
    points = (
        "1 + accepted drafts per call of the target, in the colour of their γ; what the end of a "
        "text cuts off is not taken from it, as it is from block efficiency."
    )
    return [_figure("figure2", caption, points, rows, plot)]


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Returns the fastest row of each task, draft and temperature with several gammas."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["draft"], row["temperature"]), []).append(row)
    return [
        max(group, key=lambda row: row["speed_up"])
        for group in groups.values()
        if len({row["gamma"] for row in group}) > 1
    ]


def _figure_3(options: ReproduceOptions, results: Measure) -> list[ReportFigure]:
    best = fastest(speed_ups.measure_all(options, results.kept))
    plot, axes = new_figure(_ALPHA_LABEL, "optimal γ", **_SIZE)
    lines = []
    for c in CS:
        gammas = formulas.optimal_gamma(_ALPHAS_FOR_GAMMA, c)
        lines += axes.step(_ALPHAS_FOR_GAMMA, gammas, where="mid", label=f"c = {c:g}")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    points = _plot_points(axes, best, lambda row: row["gamma"], lambda row: _GREY)
    handles = [*lines, *points]
    plot.legend(handles=handles, title="Theorem 3.8", loc="outside right", frameon=False)
    caption = (
        "The γ that maximizes Theorem 3.8, found by trying every γ (section 3.5); 0, plain "
        "decoding, where α is not above c (Corollary 3.9)."
    )
    points = "the fastest of the γ that Table 2 has measured."
    return [_figure("figure3", caption, points, best, plot, timed=True)]


def _figure_4(options: ReproduceOptions, results: Measure) -> list[ReportFigure]:
    rows = speed_ups.measure_all(options, results.kept)
    speed = _draw_by_gamma(
        rows,
        lambda alphas, gamma: formulas.wall_time_improvement(alphas, gamma, 0.0),
        lambda row: row["speed_up"],
        label="speed-up, ×",
        title="Theorem 3.8, c = 0",
    )
    operations = _draw_by_gamma(
        rows,
        lambda alphas, gamma: formulas.operations_factor(alphas, gamma, 0.0),
        # Tokens that the target scored for each that was kept.
        lambda row: (row["gamma"] + 1) / row["block_efficiency"],
        label="arithmetic operations, ×",
        title="Theorem 3.11, ĉ = 0",
    )
    return [
        _figure(
            "figure4_speed",
            "Speed-up over plain decoding by Theorem 3.8, c = 0. The paper draws this and the "
            "next into one.",
            "measured, where drafts and verification have their cost.",
            rows,
            speed,
            timed=True,
        ),
        _figure(
            "figure4_operations",
            "Arithmetic operations over plain decoding's by Theorem 3.11, ĉ = 0.",
            "tokens that the target scored for each that was kept.",
            rows,
            operations,
        ),
    ]


FIGURE_2 = Exhibit("Figure 2. Expected number of generated tokens as a function of α", _figure_2)
FIGURE_3 = Exhibit("Figure 3. The optimal γ as a function of α for various values of c", _figure_3)
FIGURE_4 = Exhibit(
    "Figure 4. Speed-up and the increase in arithmetic operations as a function of α", _figure_4
)
