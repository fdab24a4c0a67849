"""What the report shows of an item: tables and figures, and the origin of every number."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from spec_t5x.errors import InputError, check_at_least
from spec_t5x.labs.benchmark.traces import TraceLine
from spec_t5x.labs.reproduction.columns import Column, Origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A row for each dictionary, with the values that the columns name."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    note: str = ""

    @property
    def values(self) -> list[list[float | int | str | None]]:
        """The cells, unrounded."""
        return [[row.get(column.key) for column in self.columns] for row in self.rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """A plot, saved as SVG and PNG; or the lines of a decode."""

    # Of the files: "figure2".
    name: str
    caption: str
    origins: Sequence[Origin]
    plot: Figure | None = None
    trace: Sequence[TraceLine] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """What the user chose for the whole run."""

    # Fewer inputs, tokens and repeats: minutes instead of an hour.
    quick: bool = False
    seed: int = 0
    # Holds ``ende/dev.tsv.gz`` and ``summarize/debian_dev.tsv.gz``; None takes the texts
    # that come with the package.
    data_dir: Path | str | None = None

    def __post_init__(self):
        # gin hands over whatever a file binds.
        if not isinstance(self.quick, bool):
            raise InputError(f"quick is {self.quick!r}: give True or False")
        check_at_least(self, seed=0)
        if self.data_dir is not None:
            if not isinstance(self.data_dir, str | Path):
                raise InputError(f"data_dir is {self.data_dir!r}: give a text in quotes")
            object.__setattr__(self, "data_dir", Path(self.data_dir))


class Exhibit(NamedTuple):
    """A table or figure of the paper."""

    title: str
    # ``content(options, results)`` is what the report shows. It calls ``results``
    # (``kept_results.Results``) to measure, which keeps each result; where that gives None, as in
    # a plan or after a failure, it shows the rest.
    content: Callable[[ReproduceOptions, Any], Sequence[ReportTable | ReportFigure]]
