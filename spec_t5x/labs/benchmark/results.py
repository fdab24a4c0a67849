"""Output of measurements: tables for people, JSON for programs."""

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from tabulate import tabulate

from spec_t5x.labs.writing import reported
from spec_t5x.machine.atomic import write_whole
from spec_t5x.machine.description import machine

Row = TypeVar("Row")

# A cell without a value.
_NONE = "—"
# Settings that hold paths, of which ``save`` writes only the last component.
_PATHS = ("data", "target", "draft", "vocabulary")


@dataclasses.dataclass(frozen=True)
class Table:
    """Table of cells; ``str`` formats it as Markdown."""

    # Cells by title, equally many in each column: text, an unformatted number, or None.
    columns: dict[str, list[Any]]
    # A paragraph below the table.
    notes: str

    def __str__(self) -> str:
        lines = tabulate(self.columns, "keys", "pipe", missingval=_NONE, disable_numparse=True)
        return f"{lines}\n\n{self.notes}" if self.notes else lines


def table(columns: Mapping[str, Callable[[Row], Any]], rows: Sequence[Row], *notes: str) -> Table:
    """Makes a table with a line for each row; ``columns`` maps a title to a function of the row.

    A None cell is shown as a dash, and a column of None alone is left out. Notes are joined below.
    """
    cells = {title: [cell(row) for row in rows] for title, cell in columns.items()}
    cells = {title: column for title, column in cells.items() if any(c is not None for c in column)}
    return Table(cells, " ".join(notes))


def show(*parts: Table | str) -> None:
    """Prints tables and paragraphs: fitted to a terminal's width, or as Markdown elsewhere."""
    width = shutil.get_terminal_size().columns
    if sys.stdout.isatty():
        parts = [
            "\n\n".join(_laid_out(p, width)) if isinstance(p, Table) else p.removeprefix("## ")
            for p in parts
        ]
    print("\n\n".join(map(str, parts)), flush=True)


def save(path: Path, rows: Sequence[Mapping[str, Any]], **settings: Any) -> None:
    """Writes a JSON file of the machine, the rows and the dataclasses ``settings``, by name.

    Paths are cut to their last component; the settings ``drafts`` and ``pairs`` are left out. The
    file also has the ``peak_memory`` so far.
    """
    shown = {name: _without_folders(dataclasses.asdict(each)) for name, each in settings.items()}
    memory = {"peak_memory_bytes": peak_memory()}
    write_json(path, {"machine": machine(), **memory, **shown, "rows": list(rows)})


def peak_memory() -> int | None:
    """Returns the most bytes that this process's first device held; None if unknown (a CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes values to a JSON file, whole or not at all, and makes its folder if there is none."""
    content = json.dumps(values, indent=1) + "\n"
    with reported(path, "free some space, or give another file"):
        path = path.resolve()
        if path.exists() and not path.is_file():
            # Such as /dev/null, which no file may replace.
            path.write_text(content, encoding="utf-8")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [content.encode()])


def without_folder(draft: str) -> str:
    """Removes the folders from a draft's name, or from a path.

    >>> without_folder("transformer:/home/me/draft"), without_folder("/data/dev.tsv")
    ('transformer:draft', 'dev.tsv')
    """
    kind, colon, argument = draft.rpartition(":")
    return f"{kind}{colon}{Path(argument).name}"


def _without_folders(settings: dict[str, Any]) -> dict[str, Any]:
    # The rows have the names of the drafts.
    return {
        name: without_folder(value) if name in _PATHS and isinstance(value, str) else value
        for name, value in settings.items()
        if name not in ("drafts", "pairs")
    }


def _laid_out(table: Table, width: int) -> Iterator[str]:
    """Yields the table as texts that fit a terminal of ``width`` characters, then its notes.

    Columns of one value are joined to a line, or listed if there are no others. The others are in
    narrower tables, each of which begins with the columns that tell the rows apart.
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
    """Returns how many leading columns tell all rows apart, or 1 if even all of them do not."""
    for count in range(1, len(columns)):
        rows = list(zip(*columns[:count], strict=True))
        if len({*rows}) == len(rows):
            return count
    return 1


def _text(columns: Mapping[str, Sequence[str]], titles: Sequence[str]) -> str:
    shown = {title.replace(" ", "\n"): columns[title] for title in titles}
    return tabulate(shown, "keys", "simple", disable_numparse=True)
