"""Contents of the report: tables and figures, and the origin of every number."""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from spec_t5x.errors import InputError
from spec_t5x.labs.benchmark.traces import TraceLine
from spec_t5x.machine.paths import expanded
from spec_t5x.names import AUTO
from spec_t5x.options import check_types


class Origin(enum.StrEnum):
    """Origins of numbers, which the report names for every column and figure."""

    CLOSED_FORM = "closed form"
    MEASURED = "measured here"
    COMPILED = "compiled for TPU-v4"
    PAPER = "the paper's"
    # No origin: names of rows, and settings.
    LABEL = ""


class Column(NamedTuple):
    """Column of a table."""

    origin: Origin
    # Key of the value in each row; None or absent is an empty cell.
    key: str
    title: str
    # Format of numbers; strings stay as they are.
    format: str = ".2f"


def label(key: str, title: str | None = None) -> Column:
    """Makes a column of names or settings; its title is ``key`` by default."""
    return Column(Origin.LABEL, key, title or key, "g")


closed_form = partial(Column, Origin.CLOSED_FORM)
measured = partial(Column, Origin.MEASURED)
compiled = partial(Column, Origin.COMPILED)
paper = partial(Column, Origin.PAPER)

TEMPERATURE = label("temperature", "temp.")
# The first columns of every table with rows of Table 2.
SETTING = (label("task"), label("draft"), TEMPERATURE)
GAMMA = label("gamma", "γ")
LENIENCE = label("lenience", "lenience l")
PROPOSED = measured("proposed", "proposed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportTable:
    """Table of the report: rows are dictionaries, of which a column shows the value of its key."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    note: str = ""

    @property
    def origins(self) -> set[Origin]:
        """Origins of the columns."""
        return {column.origin for column in self.columns}

    @property
    def values(self) -> list[list[float | int | str | None]]:
        """Unrounded cells by row; None is an empty cell."""
        return [[row.get(column.key) for column in self.columns] for row in self.rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """Figure of the report: either a plot, saved as SVG and PNG, or the trace of a decode."""

    # Name of the files: "figure2".
    name: str
    caption: str
    origins: Sequence[Origin]
    plot: Figure | None = None
    trace: Sequence[TraceLine] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Settings of ``spec-t5x reproduce``."""

    # Fewer inputs, tokens and repeats: minutes instead of an hour.
    quick: bool = False
    seed: int = 0
    # Holds ``ende/dev.tsv.gz`` and ``summarize/debian_dev.tsv.gz``; None takes the texts
    # that come with the package.
    data_dir: Path | str | None = None
    # For the item "public": a file of pairs; or the public target, a folder of T5 1.0 in place
    # of the Hub, files of the tasks' texts (``TASK=FILE``) in place of seqio's data, and n-gram
    # tables of the vocabulary.
    pairs: Path | str | None = None
    target: str = AUTO
    models: Path | str | None = None
    data: tuple | list = ()
    ngrams: Path | str | None = None

    def __post_init__(self):
        check_types(self)
        if not all(isinstance(each, str) for each in self.data):
            raise InputError(f"data is {self.data!r}: give a list of texts, TASK=FILE")
        for name in ("data_dir", "pairs", "models", "ngrams"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, expanded(value))
        if self.pairs and self.built_in:
            raise InputError(
                f"--{self.built_in[0]} is for the built-in pairs, and --pairs {self.pairs} has its "
                "own: give one of them"
            )

    @property
    def built_in(self) -> list[str]:
        """Names of the given options that are for the built-in pairs of public weights."""
        given = {name: getattr(self, name) for name in ("models", "data", "ngrams")}
        given = {"target": self.target != AUTO, **given}
        return [name for name, is_given in given.items() if is_given]


class Exhibit(NamedTuple):
    """Table or figure of the paper."""

    title: str
    # ``content(options, results)`` returns the tables and figures to show. To measure it calls
    # ``results`` (``kept_results.Results``), which stores the result, or returns None if measuring
    # failed; content that needs the result is then left out.
    content: Callable[[ReproduceOptions, Any], Sequence[ReportTable | ReportFigure]]
    # Raises ``InputError`` for a user's mistake before anything is measured or written.
    check: Callable[[ReproduceOptions], None] = lambda options: None
