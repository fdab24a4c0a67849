"""The tables of README and docs are those of the results that are kept."""

import json
import runpy
from pathlib import Path

import pytest

from benchmarks import plot_growth

REPOSITORY = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(REPOSITORY / "scripts" / "tables.py"))


@pytest.mark.parametrize("document", SCRIPT["DOCUMENTS"], ids=lambda path: path.name)
def test_a_document_has_the_tables_of_its_files(document):
    text = document.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->")
    assert SCRIPT["filled"](text, REPOSITORY) == text


def test_a_table_is_replaced_and_what_is_around_it_stays(tmp_path, monkeypatch):
    (tmp_path / "figures.json").write_text('{"rows": [3, 4]}', encoding="utf-8")
    monkeypatch.setitem(SCRIPT["MAKERS"], "sums", lambda values: f"| {sum(values['rows'])} |")
    text = "before\n<!-- table: sums figures.json -->\nold\n<!-- end of table -->\nafter\n"
    expected = text.replace("old\n", "\n| 7 |\n\n")
    assert SCRIPT["filled"](text, tmp_path) == expected
    # Once more changes nothing.
    assert SCRIPT["filled"](expected, tmp_path) == expected


def test_the_figure_of_growth_has_every_walk():
    rows = json.loads((REPOSITORY / "benchmarks" / "growth.json").read_text())["rows"]
    figure = plot_growth.draw(rows)
    assert len(figure.axes) == 6
    for panel in figure.axes:
        measured, predicted, _ = panel.lines
        assert len(measured.get_xdata()) == len(predicted.get_xdata()) >= 1
        assert list(measured.get_xdata()) == sorted(measured.get_xdata())
