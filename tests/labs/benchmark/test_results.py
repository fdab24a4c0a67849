"""Tables and records of results."""

import dataclasses
import io
import json
import sys

import pytest

from spec_t5x.labs.benchmark import results
from spec_t5x.machine.description import free_memory, machine


@dataclasses.dataclass(frozen=True)
class Settings:
    data: str = "somewhere/pairs.tsv"
    # Rows name them.
    drafts: tuple = ("ngram:/home/me/tables",)
    repeats: int = 3


def test_a_table_leaves_out_columns_without_values():
    rows = [{"draft": "copy", "alpha": None}, {"draft": "ngram", "alpha": 0.25}]
    columns = {name: lambda row, name=name: row.get(name) for name in ("draft", "alpha", "c")}
    lines = str(results.table(columns, rows, "A note,", "and another.")).splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:4:2]] == [
        ["draft", "alpha"],
        ["copy", "—"],
    ]
    assert lines[-1] == "A note, and another."


@pytest.fixture
def shown(monkeypatch):
    """``shown(*parts)``: what a terminal of 80 columns is shown."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def show(*parts) -> str:
        for name, value in {"COLUMNS": "80", "TERM": "dumb"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", terminal := Terminal())
        results.show(*parts)
        return terminal.getvalue()

    return show


def rows_of(count: int, columns: int) -> tuple[dict, list[dict]]:
    """Columns with long titles and other values in each row, but for two of them."""
    titles = ["draft", "temp.", *(f"figure number {n}" for n in range(columns))]
    rows = [
        {title: f"{place}.{n}" if n >= 2 else ["transformer", str(place)][n]
         for n, title in enumerate(titles)}
        for place in range(count)
    ]  # fmt: skip
    return {title: lambda row, title=title: row[title] for title in titles}, rows


def test_a_wide_table_is_broken_for_a_terminal_and_every_figure_is_there(shown):
    columns, rows = rows_of(count=3, columns=20)
    lines = shown(results.table(columns, rows, "A note."), "What to do.").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "In all rows: draft transformer." and "transformer" not in lines[1:]
    assert lines[-3:] == ["A note.", "", "What to do."]
    words = " ".join(lines).split()
    assert all(words.count(f"{place}.{n}") == 1 for place in range(3) for n in range(2, 22))
    # Each part names its rows.
    assert words.count("temp.") > 1


def test_a_row_alone_is_a_list(shown):
    columns, rows = rows_of(count=1, columns=20)
    lines = shown(results.table(columns, rows)).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["draft", "transformer"], ["temp.", "0"], ["figure", "number", "0", "0.2"]
    ]  # fmt: skip
    assert len(lines) == 22


def test_elsewhere_it_is_markdown(capsys):
    columns, rows = rows_of(count=2, columns=20)
    table = results.table(columns, rows)
    results.show("## Title", table, "What to do.")
    assert capsys.readouterr().out == f"## Title\n\n{table}\n\nWhat to do.\n"


def test_a_record_has_machine_settings_and_rows_but_not_where_files_were(tmp_path):
    path = tmp_path / "new" / "figures.json"
    results.save(path, [{"speed_up": 1.5}], options=Settings())
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["machine"] == machine() and kept["rows"] == [{"speed_up": 1.5}]
    assert kept["options"] == {"data": "pairs.tsv", "repeats": 3}
    assert results.without_folder("ngram:/home/me/tables") == "ngram:tables"


def test_the_machine_is_described():
    found = machine()
    assert all(found[name] for name in ("platform", "num_devices", "processor", "threads", "jax"))
    assert free_memory() > 0
