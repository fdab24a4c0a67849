"""Results of measurements: tables for people, JSON for programs."""

import dataclasses
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text
from tabulate import tabulate

from spec_t5x.machine.description import machine

Row = TypeVar("Row")

# Of a cell without a value.
_NONE = "—"
# Settings that hold paths: the record has their last component only.
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
    """A table; a cell of None is a dash, and a column of nothing else is left out.

    Args:
      columns: by title, the cell of a row: text, or a number that needs no format.
      rows: a line each.
      notes: footnotes, joined to a paragraph below the table.
    """
    cells = {title: [cell(row) for row in rows] for title, cell in columns.items()}
    cells = {title: column for title, column in cells.items() if any(c is not None for c in column)}
    return Table(cells, " ".join(notes))


def show(*parts: Table | str) -> None:
    """Prints tables and paragraphs: laid out for a terminal, as Markdown elsewhere."""
    if not sys.stdout.isatty():
        print("\n\n".join(map(str, parts)), flush=True)
        return
    console = Console(highlight=False, markup=False)
    for number, part in enumerate(parts):
        if number:
            console.print()
        laid_out = _laid_out(part, console.width) if isinstance(part, Table) else [_heading(part)]
        console.print(*laid_out, sep="\n")


def save(path: Path, rows: Sequence[Mapping[str, Any]], **settings: Any) -> None:
    """Writes the result record: the machine, the settings and the rows.

    Args:
      path: of the JSON file; its folder is made.
      rows: what was measured.
      settings: dataclasses, by the names that the record gives them, without their folders.
    """
    shown = {name: _without_folders(dataclasses.asdict(each)) for name, each in settings.items()}
    write_json(path, {"machine": machine(), **shown, "rows": list(rows)})


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes values, and the folder they are to be in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def without_folder(draft: str) -> str:
    """``ngram:/home/me/tables`` as ``ngram:tables``.

    >>> without_folder("transformer:/home/me/draft"), without_folder("/data/dev.tsv")
    ('transformer:draft', 'dev.tsv')
    """
    kind, colon, argument = draft.rpartition(":")
    return f"{kind}{colon}{Path(argument).name}"


def _without_folders(settings: dict[str, Any]) -> dict[str, Any]:
    # The rows name the drafts.
    kept = {name: value for name, value in settings.items() if name not in ("drafts", "pairs")}
    for name in _PATHS:
        if isinstance(kept.get(name), str):
            kept[name] = without_folder(kept[name])
    return kept


# --- on a terminal ---------------------------------------------------------------

_Column = Sequence[str]
# Between two columns.
_GAP = 2


def _laid_out(table: Table, width: int) -> Iterator[RenderableType]:
    """A table as a terminal of this width has room for it.

    A column that is the same in all rows is a line; the others are broken into tables below each
    other, each with the columns that tell rows apart. A row alone is a list.
    """
    columns = {
        title: [_NONE if cell is None else str(cell) for cell in column]
        for title, column in table.columns.items()
    }
    varying = {title: column for title, column in columns.items() if len(set(column)) > 1}
    if varying:
        same = [f"{title} {column[0]}" for title, column in columns.items() if title not in varying]
        if same:
            yield Text(f"In all rows: {', '.join(same)}.")
        for number, block in enumerate(_blocks(varying, width)):
            if number:
                yield ""
            yield _rich(block)
    elif columns:
        yield _rich({"": list(columns), " ": [column[0] for column in columns.values()]})
    if table.notes:
        yield Text(table.notes, style="dim")


def _blocks(columns: Mapping[str, _Column], width: int) -> Iterator[dict[str, _Column]]:
    """The columns in as few tables as there is room for."""
    titles = list(columns)
    num_labels = _num_labels(list(columns.values()))
    labels, block = titles[:num_labels], []
    for title in titles[num_labels:]:
        wanted = [*labels, *block, title]
        room = width + _GAP - sum(_width(each, columns[each]) + _GAP for each in wanted)
        if room < 0 and block:
            yield {each: columns[each] for each in (*labels, *block)}
            block = []
        block.append(title)
    yield {each: columns[each] for each in (*labels, *block)}


def _num_labels(columns: Sequence[_Column]) -> int:
    """How many of the first columns tell all rows apart; 1 if all together do not."""
    for count in range(1, len(columns)):
        rows = list(zip(*columns[:count], strict=True))
        if len(set(rows)) == len(rows):
            return count
    return 1


def _width(title: str, column: _Column) -> int:
    """Of a column whose title is broken between words."""
    return max(map(len, (*column, *title.split())), default=0)


def _rich(columns: Mapping[str, _Column]) -> RichTable:
    style = box.SIMPLE_HEAD
    found = RichTable(box=style, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    found.show_header = any(title.strip() for title in columns)
    for title, column in columns.items():
        is_number = all(cell == _NONE or cell[:1].isdigit() for cell in column)
        header = textwrap.fill(title, max(_width(title, column), 1), break_long_words=False)
        found.add_column(header, justify="right" if is_number else "left", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        found.add_row(*row)
    return found


def _heading(text: str) -> Text:
    """A paragraph, or Markdown's heading in bold."""
    heading = text.removeprefix("## ")
    return Text(heading.replace("\n", " "), style="bold" if heading != text else "")
