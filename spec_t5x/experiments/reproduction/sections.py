"""What an item of the report is made of: tables, figures and notes, each with its origin."""

import dataclasses
import enum
from collections.abc import Callable, Sequence

from matplotlib.figure import Figure as MatplotlibFigure


class Origin(enum.StrEnum):
    """How a number came about. The report says it for every column and figure."""

    CLOSED_FORM = "closed form"
    MEASURED = "measured here"
    COMPILED = "compiled for TPU-v4"
    PAPER = "the paper's"
    # A row's name, a setting.
    LABEL = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    origin: Origin
    # Of numbers, for ``format``; texts stay as they are and None is an empty cell.
    format: str = ".2f"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of numbers, texts and gaps."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[float | int | str | None]]
    notes: Sequence[str] = ()
    # Names of the parts that the figures measured here come from; () is all of the item's.
    parts: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure drawn by matplotlib, saved as PNG and SVG."""

    # Of the files: ``figure2``.
    name: str
    caption: str
    origins: Sequence[Origin]
    draw: Callable[[], MatplotlibFigure]
    # Names of the parts that the figures measured here come from; () is all of the item's.
    parts: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure that is text: an SVG, and perhaps files beside it (HTML, a trace)."""

    name: str
    caption: str
    origins: Sequence[Origin]
    svg: str
    # File name to content; linked from the report.
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    # The same as plain text, for Markdown; None leaves it out.
    text: str | None = None
    # Names of the parts that the figures measured here come from; () is all of the item's.
    parts: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One item of the report."""

    title: str
    # In one sentence, for the summary: what came out.
    finding: str = ""
    # What is seen, in sentences; how it was measured.
    paragraphs: Sequence[str] = ()
    content: Sequence[Table | Plot | Drawing] = ()
