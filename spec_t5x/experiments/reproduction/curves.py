"""Figures 2, 3 and 4: the paper's curves, with what was measured here over them."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spec_t5x.experiments.reproduction.items import Item, Part, Setting
from spec_t5x.experiments.reproduction.measured_rows import MeasuredRow, measured_rows, parts_of
from spec_t5x.experiments.reproduction.plots import COLOURS, MARKERS, new_figure
from spec_t5x.experiments.reproduction.sections import Column, Origin, Plot, Section, Table
from spec_t5x.theory import formulas

Parts = Callable[[Setting], Sequence[Part]]

# Values of gamma for which the paper draws its curves, and costs c of Figure 3.
GAMMAS = (1, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2)
_ALPHAS = np.linspace(0.0, 1.0, 201)
# Towards alpha = 1 the best gamma grows beyond all bounds.
_ALPHAS_FOR_GAMMA = np.linspace(0.0, 0.95, 191)
_ALPHAS_IN_TABLE = (0.5, 0.6, 0.7, 0.8, 0.9)

_ALPHA_LABEL = "α, the acceptance rate"


def _item(
    name: str,
    title: str,
    measured: Parts,
    make: Callable[[str, Sequence[MeasuredRow]], Section],
) -> Item:
    """A figure of closed forms; measured rows are drawn where there are any."""
    return Item(
        name=name,
        title=title,
        parts=lambda setting: (),
        borrowed=measured,
        render=lambda setting, done: make(title, measured_rows(done)),
    )


def _origins(rows: Sequence[MeasuredRow]) -> tuple[Origin, ...]:
    return (Origin.CLOSED_FORM, Origin.MEASURED) if rows else (Origin.CLOSED_FORM,)


def _gammas(rows: Sequence[MeasuredRow]) -> dict[int, str]:
    """The paper's gammas and those measured, each with the colour of its curve and points."""
    gammas = sorted({*GAMMAS, *(row.gamma for row in rows)})
    return dict(zip(gammas, itertools.cycle(COLOURS), strict=False))


def _series(rows: Sequence[MeasuredRow]) -> Iterator[tuple[str, str, list[MeasuredRow]]]:
    """A name, a marker and the rows of each task and draft."""
    groups: dict[str, list[MeasuredRow]] = {}
    for row in rows:
        groups.setdefault(f"{row.task}, {row.draft}", []).append(row)
    for (name, group), marker in zip(groups.items(), itertools.cycle(MARKERS), strict=False):
        yield name, marker, group


def _scatter(
    axes: Axes,
    rows: Sequence[MeasuredRow],
    value: Callable[[MeasuredRow], float],
    colour: Callable[[MeasuredRow], str],
) -> list[Artist]:
    """Measured points, filled at temperature 1 and hollow at 0; handles for a legend."""
    handles = []
    for name, marker, group in _series(rows):
        for row in group:
            own = colour(row)
            axes.plot(
                row.alpha,
                value(row),
                marker,
                color=own,
                markerfacecolor=own if row.temperature else "white",
                markersize=6,
                zorder=4,
            )
        handles += axes.plot([], [], marker, color="#444444", markersize=5, label=name)
    return handles


def _legends(
    axes: Axes,
    curves: Sequence[Artist],
    title: str,
    points: Sequence[Artist],
    side: str = "left",
) -> None:
    """The curves' legend, and beside it one of the measured points where there are any.

    On the ``side`` where the curves leave room: "left" or "right".
    """
    place = f"upper {side}"
    first = axes.legend(handles=list(curves), title=title, loc=place, frameon=False)
    if points:
        axes.add_artist(first)
        axes.legend(
            handles=list(points),
            title="measured, hollow at temperature 0",
            loc=place,
            bbox_to_anchor=(0.27 if side == "left" else 0.73, 1.0),
            frameon=False,
            fontsize=8,
            title_fontsize=8,
            alignment="left",
        )


# --- Figure 2 ----------------------------------------------------------------


def figure_2(measured: Parts) -> Item:
    """Expected tokens per iteration; measured: ``1 + accepted / target_calls``."""
    return _item(
        "figure2",
        "Figure 2. Expected number of generated tokens as a function of α",
        measured,
        _render_figure_2,
    )


def _render_figure_2(title: str, rows: Sequence[MeasuredRow]) -> Section:
    plot = Plot(
        name="figure2",
        caption="Tokens that one iteration of Algorithm 1 generates, for several γ."
        + (
            " Points: 1 + accepted drafts per call of the target, in the colour of their γ; what "
            "the end of a text cuts off is not taken from it, as it is from block efficiency."
            if rows
            else ""
        ),
        origins=_origins(rows),
        draw=lambda: _draw_figure_2(rows),
        parts=parts_of(rows),
    )
    return Section(
        title=title,
        finding=_finding_of_figure_2(rows),
        paragraphs=(
            "Equation 1, (1 − α^(γ+1)) / (1 − α), which takes acceptance at each place as "
            "independent and alike; γ = ∞ is the bound 1 / (1 − α) of section 3.5.",
        ),
        content=(plot,),
    )


def _finding_of_figure_2(rows: Sequence[MeasuredRow]) -> str:
    if not rows:
        return "The curves; no measured points were at hand."
    off = [row.accepted_plus_one / formulas.expected_tokens(row.alpha, row.gamma) for row in rows]
    return (
        f"{len(rows)} measured points lie at {min(off):.2f} to {max(off):.2f} of Equation 1 with "
        "their own α."
    )


def _draw_figure_2(rows: Sequence[MeasuredRow]) -> Figure:
    figure, axes = new_figure(_ALPHA_LABEL, "expected tokens per iteration")
    lines, colour_of = _gamma_curves(axes, rows, formulas.expected_tokens)
    inner = _ALPHAS[_ALPHAS < 1]
    lines += axes.plot(
        inner, formulas.oracle_tokens(inner), color="#888888", linestyle=":", label="γ = ∞"
    )
    axes.set_ylim(0.8, max(GAMMAS) + 1.2)
    points = _scatter(axes, rows, lambda row: row.accepted_plus_one, colour_of)
    _legends(axes, lines, "Equation 1", points)
    return figure


def _gamma_curves(
    axes: Axes, rows: Sequence[MeasuredRow], curve: Callable[[np.ndarray, int], np.ndarray]
) -> tuple[list[Artist], Callable[[MeasuredRow], str]]:
    """A curve over alpha for each gamma; its colour for the rows of that gamma."""
    colours = _gammas(rows)
    lines = [
        axes.plot(_ALPHAS, curve(_ALPHAS, gamma), color=colour, label=f"γ = {gamma}")[0]
        for gamma, colour in colours.items()
    ]
    axes.set_xlim(0, 1)
    return lines, lambda row: colours[row.gamma]


# --- Figure 3 ----------------------------------------------------------------


def figure_3(measured: Parts) -> Item:
    """The optimal gamma; measured: the quickest of those that were tried."""
    return _item(
        "figure3",
        "Figure 3. The optimal γ as a function of α for various values of c",
        measured,
        _render_figure_3,
    )


def _render_figure_3(title: str, rows: Sequence[MeasuredRow]) -> Section:
    best = quickest(rows)
    plot = Plot(
        name="figure3",
        caption="The γ that maximizes Theorem 3.8."
        + (" Points: the quickest γ of those measured." if best else ""),
        origins=_origins(best),
        draw=lambda: _draw_figure_3(best),
        parts=parts_of(best),
    )
    table = Table(
        caption="The optimal γ, and the improvement that it brings.",
        columns=(
            Column("α", Origin.LABEL, "g"),
            *(Column(f"γ, c = {c:g}", Origin.CLOSED_FORM, "d") for c in COSTS),
            *(Column(f"×, c = {c:g}", Origin.CLOSED_FORM) for c in COSTS),
        ),
        rows=[
            (
                alpha,
                *(int(formulas.optimal_gamma(alpha, c)) for c in COSTS),
                *(float(formulas.best_improvement(alpha, c)) for c in COSTS),
            )
            for alpha in _ALPHAS_IN_TABLE
        ],
    )
    return Section(
        title=title,
        finding=_finding_of_figure_3(best, rows),
        paragraphs=(
            "Found by trying every γ, as section 3.5 suggests. γ = 0, plain decoding, is best "
            "where α is not above c (Corollary 3.9).",
        ),
        content=(plot, table, _measured_figure_3(best, rows)) if best else (plot, table),
    )


def quickest(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """The row with the best speed-up for each task, draft and temperature.

    Settings with one gamma alone are left out: there was nothing to choose.
    """
    groups: dict[tuple, list[MeasuredRow]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    return [
        max(group, key=lambda row: row.speed_up)
        for group in groups.values()
        if len({row.gamma for row in group}) > 1
    ]


def _expected_best(row: MeasuredRow, rows: Sequence[MeasuredRow]) -> MeasuredRow:
    """The row of the same setting that is the quickest by its alpha, c and T(m)."""
    group = [other for other in rows if other.setting == row.setting]
    return max(group, key=lambda other: other.expected_with_verification)


def _finding_of_figure_3(best: Sequence[MeasuredRow], rows: Sequence[MeasuredRow]) -> str:
    if not best:
        return "The curves; no measured points were at hand."
    same = sum(row.gamma == _expected_best(row, rows).gamma for row in best)
    return (
        "The quickest γ measured is the one expected from α, c and the cost of verification in "
        f"{same} of {len(best)} settings."
    )


def _measured_figure_3(best: Sequence[MeasuredRow], rows: Sequence[MeasuredRow]) -> Table:
    return Table(
        caption="The quickest γ of those measured, and the one expected to be.",
        columns=(
            Column("task", Origin.LABEL),
            Column("draft", Origin.LABEL),
            Column("temp.", Origin.LABEL, "g"),
            Column("α", Origin.MEASURED, ".3f"),
            Column("c", Origin.MEASURED, ".3f"),
            Column("T(m)", Origin.MEASURED),
            Column("quickest γ", Origin.MEASURED, "d"),
            Column("speed-up, ×", Origin.MEASURED),
            Column("γ by α, c, T(m)", Origin.CLOSED_FORM, "d"),
            Column("γ by α, c", Origin.CLOSED_FORM, "d"),
        ),
        rows=[
            (
                row.task,
                row.draft,
                row.temperature,
                row.alpha,
                row.c,
                row.verification_cost,
                row.gamma,
                row.speed_up,
                _expected_best(row, rows).gamma,
                int(formulas.optimal_gamma(row.alpha, row.c)),
            )
            for row in best
        ],
        notes=(
            "γ by α, c, T(m) is chosen from the values that were measured; γ by α and c from "
            "all, with verification at the price of one step, as in the figure.",
        ),
        parts=parts_of(best),
    )


def _draw_figure_3(best: Sequence[MeasuredRow]) -> Figure:
    figure, axes = new_figure(_ALPHA_LABEL, "optimal γ")
    lines = [
        axes.step(
            _ALPHAS_FOR_GAMMA,
            formulas.optimal_gamma(_ALPHAS_FOR_GAMMA, c),
            where="mid",
            label=f"c = {c:g}",
        )[0]
        for c in COSTS
    ]
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    points = _scatter(axes, best, lambda row: row.gamma, lambda row: "#444444")
    _legends(axes, lines, "Theorem 3.8", points)
    return figure


# --- Figure 4 ----------------------------------------------------------------


def figure_4(measured: Parts) -> Item:
    """Speed-up and operations; measured: speed-up, and tokens scored per token kept."""
    return _item(
        "figure4",
        "Figure 4. Speed-up and the increase in arithmetic operations as a function of α",
        measured,
        _render_figure_4,
    )


def _render_figure_4(title: str, rows: Sequence[MeasuredRow]) -> Section:
    parts = parts_of(rows)
    speed = Plot(
        name="figure4_speed",
        caption="Speed-up over plain decoding by Theorem 3.8, c = 0."
        + (" Points: measured, where drafts and verification have their cost." if rows else ""),
        origins=_origins(rows),
        draw=lambda: _draw_speed(rows),
        parts=parts,
    )
    operations = Plot(
        name="figure4_operations",
        caption="Arithmetic operations over plain decoding's by Theorem 3.11, ĉ = 0."
        + (" Points: tokens that the target scored for each that was kept." if rows else ""),
        origins=_origins(rows),
        draw=lambda: _draw_operations(rows),
        parts=parts,
    )
    return Section(
        title=title,
        finding=_finding_of_figure_4(rows),
        paragraphs=(
            "The paper draws both into one figure; they are two here, so that points can be read.",
        ),
        content=(speed, operations),
    )


def _finding_of_figure_4(rows: Sequence[MeasuredRow]) -> str:
    if not rows:
        return "The curves; no measured points were at hand."
    share = [
        row.speed_up / formulas.wall_time_improvement(row.alpha, row.gamma, 0.0) for row in rows
    ]
    return (
        f"{len(rows)} measured speed-ups reach {min(share):.2f} to {max(share):.2f} of what "
        "Theorem 3.8 promises where drafts and verification cost nothing."
    )


def _draw_speed(rows: Sequence[MeasuredRow]) -> Figure:
    figure, axes = new_figure(_ALPHA_LABEL, "speed-up, ×")
    curve = lambda alphas, gamma: formulas.wall_time_improvement(alphas, gamma, 0.0)  # noqa: E731
    lines, colour_of = _gamma_curves(axes, rows, curve)
    axes.set_ylim(bottom=0)
    points = _scatter(axes, rows, lambda row: row.speed_up, colour_of)
    _legends(axes, lines, "Theorem 3.8, c = 0", points)
    return figure


def _draw_operations(rows: Sequence[MeasuredRow]) -> Figure:
    figure, axes = new_figure(_ALPHA_LABEL, "arithmetic operations, ×")
    curve = lambda alphas, gamma: formulas.operations_factor(alphas, gamma, 0.0)  # noqa: E731
    lines, colour_of = _gamma_curves(axes, rows, curve)
    axes.set_ylim(bottom=0)
    points = _scatter(axes, rows, scored_per_kept, colour_of)
    _legends(axes, lines, "Theorem 3.11, ĉ = 0", points, side="right")
    return figure


def scored_per_kept(row: MeasuredRow) -> float:
    """Tokens that the target scored for each that was kept: its operations, measured."""
    return (row.gamma + 1) / row.block_efficiency
