"""Figures as files: PNG and SVG of plots, SVG and what lies beside it of drawings."""

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import matplotlib

from spec_t5x.experiments.reproduction.sections import Drawing, Plot
from spec_t5x.machine.atomic import write_whole

FOLDER = "figures"
_DOTS_PER_INCH = 160


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """Where a figure lies, relative to the report."""

    svg: str
    # A drawing has none.
    png: str | None = None
    # File name to path.
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)


def save(content: Plot | Drawing, directory: Path) -> Picture:
    """Writes a figure into ``figures`` in the report's directory.

    Raises:
      OSError: it cannot be written.
      ValueError: a drawing is no SVG, or a file's name leads elsewhere.
    """
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Plot):
        return _save_plot(content, folder)
    return _save_drawing(content, folder)


def _save_plot(plot: Plot, folder: Path) -> Picture:
    _check_name(plot.name)
    figure = plot.draw()
    # The same data give the same file: no date, and ids that do not depend on chance.
    with matplotlib.rc_context({"svg.hashsalt": plot.name}):
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=_DOTS_PER_INCH)
    write_whole(folder / f"{plot.name}.svg", [svg.getvalue()])
    write_whole(folder / f"{plot.name}.png", [png.getvalue()])
    return Picture(svg=f"{FOLDER}/{plot.name}.svg", png=f"{FOLDER}/{plot.name}.png")


def _save_drawing(drawing: Drawing, folder: Path) -> Picture:
    for name in (drawing.name, *drawing.files):
        _check_name(name)
    try:
        root = ElementTree.fromstring(drawing.svg)
    except ElementTree.ParseError as error:
        raise ValueError(f"the drawing {drawing.name} is no XML: {error}") from error
    if root.tag != "{http://www.w3.org/2000/svg}svg":
        raise ValueError(f"the drawing {drawing.name} is {root.tag}, no SVG")
    write_whole(folder / f"{drawing.name}.svg", [drawing.svg.encode()])
    for name, text in drawing.files.items():
        write_whole(folder / name, [text.encode()])
    return Picture(
        svg=f"{FOLDER}/{drawing.name}.svg",
        files={name: f"{FOLDER}/{name}" for name in drawing.files},
    )


def _check_name(name: str) -> None:
    if not name or Path(name).name != name:
        raise ValueError(f"a figure's file is named {name!r}: give a plain name")
