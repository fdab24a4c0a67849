"""Tables and records of results."""

import dataclasses
import errno
import json
import os
import stat
import sys

import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.benchmark import results
from spec_t5x.machine import atomic
from spec_t5x.machine.description import machine


@dataclasses.dataclass(frozen=True)
class Settings:
    data: str = "somewhere/pairs.tsv"
    # The rows name them.
    drafts: tuple = ("ngram:/home/me/tables",)
    repeats: int = 3


def test_a_file_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    results.write_json(path, {"rows": [1]})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        results.write_json(path, {"rows": [1, 2]})
    assert json.loads(path.read_text()) == {"rows": [1]}


def test_a_folder_that_cannot_be_synced_is_no_failure(tmp_path, monkeypatch):
    sync = os.fsync

    def of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", of_files)
    results.write_json(tmp_path / "rows.json", {"rows": []})
    assert json.loads((tmp_path / "rows.json").read_text()) == {"rows": []}


def test_a_table_leaves_out_columns_without_values(capsys):
    rows = [{"draft": "copy", "alpha": None}, {"draft": "ngram", "alpha": 0.25}]
    columns = {name: lambda row, name=name: row.get(name) for name in ("draft", "alpha", "c")}
    table = results.table(columns, rows, "A note,", "and another.")
    lines = str(table).splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:4:2]] == [
        ["draft", "alpha"],
        ["copy", "—"],
    ]
    assert lines[-1] == "A note, and another."
    results.show("## Title", table, "What to do.")
    assert capsys.readouterr().out == f"## Title\n\n{table}\n\nWhat to do.\n"


@pytest.fixture
def shown(monkeypatch, capsys):
    """Provides ``shown(count, *more)``: what a terminal of 80 columns shows of so many rows.

    They have 22 columns, of which the first is the same in all rows.
    """
    titles = ["draft", "temp.", *(f"figure number {n}" for n in range(20))]

    def show(count, *more) -> list[str]:
        rows = [
            ["transformer", str(place), *(f"{place}.{n}" for n in range(20))]
            for place in range(count)
        ]
        columns = {title: lambda row, n=n: row[n] for n, title in enumerate(titles)}
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        results.show(results.table(columns, rows, "A note."), *more)
        return capsys.readouterr().out.splitlines()

    return show


def test_a_wide_table_is_broken_for_a_terminal_and_every_figure_is_there(shown):
    lines = shown(3, "What to do.")
    assert max(map(len, lines)) <= 80
    assert lines[0] == "In all rows: draft transformer." and "transformer" not in lines[1:]
    assert lines[-3:] == ["A note.", "", "What to do."]
    words = " ".join(lines).split()
    assert all(words.count(f"{place}.{n}") == 1 for place in range(3) for n in range(20))
    # Each part names its rows.
    assert words.count("temp.") > 1


def test_a_row_alone_is_a_list(shown):
    lines = shown(1)
    assert [line.split() for line in lines[:3]] == [
        ["draft", "transformer"], ["temp.", "0"], ["figure", "number", "0", "0.0"]
    ]  # fmt: skip
    assert len(lines) == 24


def test_a_record_has_machine_settings_and_rows_but_not_where_files_were(tmp_path):
    path = tmp_path / "new" / "figures.json"
    results.save(path, [{"speed_up": 1.5}], options=Settings())
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["machine"] == machine() and kept["rows"] == [{"speed_up": 1.5}]
    assert kept["options"] == {"data": "pairs.tsv", "repeats": 3}
