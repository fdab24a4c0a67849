"""Plots speed-ups by batch size, output length and gamma, from results of ``growth.gin``.

python -m benchmarks.plot_growth benchmarks/growth.json benchmarks/growth.svg
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks import command
from spec_t5x.labs.reproduction import plots

# Labels of the axes, by key of a row.
AXES = {"batch_size": "batch size", "max_decode_len": "output tokens", "gamma": "gamma"}
Rows = Sequence[Mapping[str, Any]]


def walk(rows: Rows, axis: str) -> Rows:
    """Returns the rows that differ from the first only in ``axis``, sorted by it."""
    fixed = [name for name in AXES if name != axis]
    along = [row for row in rows if all(row[name] == rows[0][name] for name in fixed)]
    return sorted(along, key=lambda row: row[axis])


def draw(rows: Rows) -> Figure:
    """Returns a figure of speed-ups with a panel per axis."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    highest = max(max(row["loop_speed_up"] or 0.0, row["predicted"]) for row in rows)
    for (axis, title), panel in zip(AXES.items(), panels, strict=True):
        plots.style(panel)
        along = walk(rows, axis)
        values = [row[axis] for row in along]
        panel.plot(values, [row["loop_speed_up"] for row in along], "o-", label="measured")
        panel.plot(values, [row["predicted"] for row in along], "s--", label="predicted")
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(values, map(str, values))
        panel.minorticks_off()
        # The same scale in all panels, with room for the highest marker.
        panel.set_ylim(0, 1.06 * highest)
        panel.set_xlabel(title)
    panels[0].set_ylabel("speed-up")
    panels[0].legend()
    return figure


if __name__ == "__main__":
    command.plot("plot_growth", __doc__, lambda found: draw(found["rows"]))
