"""Results of measurements: tables for people, JSON for programs."""

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tabulate import tabulate

from spec_t5x.machine.description import machine

Row = TypeVar("Row")

# A cell without a value.
_NONE = "—"
# Settings that hold paths, of which the record has the last component only.
_PATHS = ("data", "target", "draft", "vocabulary")


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells by column; as text, Markdown."""

    # Text, a number that needs no format, or None for none; as many in each column.
    columns: dict[str, list[Any]]
    # A paragraph below the table.
    notes: str

    def __str__(self) -> str:
        lines = tabulate(self.columns, "keys", "pipe", missingval=_NONE, disable_numparse=True)
        return f"{lines}\n\n{self.notes}" if self.notes else lines


def table(columns: Mapping[str, Callable[[Row], Any]], rows: Sequence[Row], *notes: str) -> Table:
    """Makes a table with a line for each row; ``columns`` have its cells, by title.

    A cell of None is a dash, and a column of nothing else is left out.
    """
    cells = {title: [cell(row) for row in rows] for title, cell in columns.items()}
    cells = {title: column for title, column in cells.items() if any(c is not None for c in column)}
    return Table(cells, " ".join(notes))


def show(*parts: Table | str) -> None:
    """Prints tables and paragraphs: laid out for a terminal, as Markdown elsewhere."""
    width = shutil.get_terminal_size().columns
    if sys.stdout.isatty():
        parts = [
            "\n\n".join(_laid_out(p, width)) if isinstance(p, Table) else p.removeprefix("## ")
            for p in parts
        ]
    print("\n\n".join(map(str, parts)), flush=True)


def save(path: Path, rows: Sequence[Mapping[str, Any]], **settings: Any) -> None:
    """Writes the result record: the machine, the rows, and dataclasses of settings by name.

    Paths in the settings lose their folders.
    """
    shown = {name: _without_folders(dataclasses.asdict(each)) for name, each in settings.items()}
    write_json(path, {"machine": machine(), **shown, "rows": list(rows)})


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes values, and makes the folder that they are to be in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def without_folder(draft: str) -> str:
    """Shortens ``ngram:/home/me/tables`` to ``ngram:tables``.

    >>> without_folder("transformer:/home/me/draft"), without_folder("/data/dev.tsv")
    ('transformer:draft', 'dev.tsv')
    """
    kind, colon, argument = draft.rpartition(":")
    return f"{kind}{colon}{Path(argument).name}"


def _without_folders(settings: dict[str, Any]) -> dict[str, Any]:
    # The rows name the drafts.
    return {
        name: without_folder(value) if name in _PATHS and isinstance(value, str) else value
        for name, value in settings.items()
        if name not in ("drafts", "pairs")
    }


def _laid_out(table: Table, width: int) -> Iterator[str]:
    """Yields the parts of a table that fit a terminal of ``width`` columns.

    Columns that are the same in all rows are one line; the others are in tables below each other,
    each of which begins with the columns that tell the rows apart. A row alone is a list.
    """
    columns = {
        title: [_NONE if cell is None else str(cell) for cell in column]
        for title, column in table.columns.items()
    }
    same = {title: column[0] for title, column in columns.items() if len({*column}) == 1}
    varying = {title: column for title, column in columns.items() if title not in same}
    if same and varying:
        yield f"In all rows: {', '.join(map(' '.join, same.items()))}."
    elif same:
        yield tabulate(same.items(), tablefmt="plain", disable_numparse=True)
    titles = list(varying)
    num_labels = _num_labels(list(varying.values()))
    labels, block = titles[:num_labels], []
    for title in titles[num_labels:]:
        wider = _text(varying, [*labels, *block, title])
        if block and max(map(len, wider.splitlines())) > width:
            yield _text(varying, labels + block)
            block = []
        block.append(title)
    if varying:
        yield _text(varying, labels + block)
    if table.notes:
        yield textwrap.fill(table.notes, width)


def _num_labels(columns: Sequence[Sequence[str]]) -> int:
    """Counts the first columns that tell all rows apart; 1 if all together do not."""
    for count in range(1, len(columns)):
        rows = list(zip(*columns[:count], strict=True))
        if len({*rows}) == len(rows):
            return count
    return 1


def _text(columns: Mapping[str, Sequence[str]], titles: Sequence[str]) -> str:
    shown = {title.replace(" ", "\n"): columns[title] for title in titles}
    return tabulate(shown, "keys", "simple", disable_numparse=True)
