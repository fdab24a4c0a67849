"""Results of measurements: tables for people, JSON for programs."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tabulate import tabulate

from spec_t5x.machine.description import machine

Row = TypeVar("Row")

# Settings that hold paths: the record has their last component only.
_PATHS = ("data", "target", "draft", "vocabulary")


def table(columns: Mapping[str, Callable[[Row], Any]], rows: Sequence[Row], *notes: str) -> str:
    """A Markdown table; a cell of None is a dash, and a column of nothing else is left out.

    Args:
      columns: by title, the cell of a row: text, or a number that needs no format.
      rows: a line each.
      notes: footnotes, joined to a paragraph below the table.
    """
    cells = {title: [cell(row) for row in rows] for title, cell in columns.items()}
    cells = {title: column for title, column in cells.items() if any(c is not None for c in column)}
    lines = tabulate(cells, "keys", "pipe", missingval="—", disable_numparse=True)
    return f"{lines}\n\n{' '.join(notes)}" if notes else lines


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
