"""Style of the report's plots, drawn without matplotlib's global state."""

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Distinguishable in print and by colour-blind readers (Okabe and Ito), dark enough for lines.
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a5c00"),
    *("#56b4e9", "#444444", "#a0522d", "#8b9dc3"),
)
_INK = "#333333"


def new_figure(x_label: str, y_label: str, *, width: float, height: float) -> tuple[Figure, Axes]:
    """Makes a figure with one pair of axes in the report's style; sizes are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    style(axes)
    return figure, axes


def style(axes: Axes) -> None:
    """Sets colours, grid and frame of a pair of axes."""
    axes.set_prop_cycle(color=list(COLOURS))
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color("#888888")
