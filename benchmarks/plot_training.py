"""Plots the loss of trainings by step, from figures of their ``metrics.jsonl``.

python -m benchmarks.plot_training benchmarks/t5_training.json benchmarks/t5_training.svg
"""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from benchmarks import command
from spec_t5x.labs.reproduction import plots


def draw(trainings: Mapping[str, Any]) -> Figure:
    """Returns a figure with a line of training loss for each run, and points of dev loss."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    panel = figure.subplots()
    plots.style(panel)
    for run in trainings["runs"]:
        (line,) = panel.plot(*zip(*run["loss"], strict=True), label=f"{run['name']}: training")
        if run["dev_loss"]:
            points = zip(*run["dev_loss"], strict=True)
            panel.plot(*points, "o", color=line.get_color(), label=f"{run['name']}: dev")
    panel.set_xlabel(f"steps of {trainings['tokens_per_step']:,} tokens")
    panel.set_ylabel("loss per target token")
    panel.set_ylim(0, 4)
    panel.legend()
    return figure


if __name__ == "__main__":
    command.plot("plot_training", __doc__, draw)
