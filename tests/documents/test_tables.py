"""The tables of README and docs are those of the results that are kept."""

import json
import runpy
from pathlib import Path

import pytest

from benchmarks import plot_growth
from spec_t5x.labs.reproduction import contents, report, stock_t5x
from spec_t5x.labs.reproduction.speed_ups import MEASURED_COLUMNS
from spec_t5x.labs.tpu.chips import CHIPS

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
    assert SCRIPT["filled"](expected, tmp_path) == expected


def test_the_leaderboard_prefers_gamma_auto_to_faster_ones():
    rows = [
        {"gamma": gamma, "speed_up": speed_up, "batch_size": batch, "draft": "d", "temperature": 0}
        | {"alpha": 0.5, "block_efficiency": 2.0, "identical": True}
        for gamma, speed_up, batch in ((3, 1.5, 1), ("auto", 1.25, 1), (5, 1.75, 1), (7, 9.0, 8))
    ]
    machine = {"device": "cpu", "processor": "P"}
    files = [{"machine": machine, "models": {"target": "t"}, "rows": rows}]
    assert "1.25" in SCRIPT["leaderboard"](files)
    files[0]["rows"] = [row for row in rows if row["gamma"] != "auto"]
    found = SCRIPT["leaderboard"](files)
    assert "1.75" in found and "1.50" not in found and "9.00" not in found


def test_the_leaderboard_names_what_was_rounded_and_what_is_doubtful():
    row = {"gamma": 3, "speed_up": 1.5, "batch_size": 1, "draft": "draft", "temperature": 0.0}
    row |= {"alpha": 0.5, "block_efficiency": 2.0, "identical": True, "beside": 0.45}
    file = {"machine": {"device": "H", "processor": "P"}, "rows": [row]}
    file |= {"models": {"target": "t", "draft": None, "weights": "int8", "kv": "auto"}}
    line = SCRIPT["leaderboard"]([file]).splitlines()[2]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        *("H", "t int8", "the packaged one", "-", "0.0", "3", "0.500", "2.00"),
        *("1.50 (others 45%)", "yes"),
    ]
    row["lossy"] = True
    assert "1.50" not in SCRIPT["leaderboard"]([file])


def test_the_leaderboard_reads_the_report_of_public_weights():
    measured = [column for column in MEASURED_COLUMNS if column.key != "loop_speed_up"]
    paper = contents.paper("paper_speed_up", "speed-up")
    texts = contents.label("target"), *contents.SETTING
    of_all = {"target": "t5-3b", "task": "EnDe", "temperature": 0.0, "paper_speed_up": 3.4}
    table = contents.ReportTable(
        caption="Table 2",
        columns=(*texts, paper, *measured),
        rows=[
            of_all | row
            for row in (
                {"draft": stock_t5x.NAME, "speed_up": 0.5, "same_text": "yes"},
                {"draft": "t5-small", "gamma_text": "7", "speed_up": 2.5, "same_text": "yes"}
                | {"alpha": 0.75, "block_efficiency": 3.5},
                {"draft": "t5-small", "gamma_text": "auto: 5", "speed_up": 2.25}
                | {"alpha": 0.8, "block_efficiency": 3.0, "same_text": "1 differ"},
                {"draft": "copy", "gamma_text": "auto: 0", "speed_up": 1.0, "same_text": "yes"},
                {"draft": "t5-small", "gamma_text": "7", "speed_up": 1.5, "temperature": 1.0}
                | {"alpha": 0.5, "block_efficiency": 2.0},
            )
        ],
    )
    other = contents.ReportTable(caption="Quality", columns=texts, rows=[of_all])
    section = {"name": "public", "title": "", "not_computed": [], "measured": {}}
    section["content"] = [other, table]
    run = {"machine": {"device": "TPU v5e", "processor": "P"}}
    kept = json.loads(report._json([section], run))
    lines = SCRIPT["leaderboard"]([kept]).splitlines()[2:5]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [
        ["TPU v5e", "t5-3b", "copy", "EnDe", "0.0", "auto", "-", "-", "1.00", "yes"],
        ["TPU v5e", "t5-3b", "t5-small", "EnDe", "0.0", "auto", "0.800", "3.00", "2.25", "no"],
        ["TPU v5e", "t5-3b", "t5-small", "EnDe", "1.0", "7", "0.500", "2.00", "1.50", "-"],
    ]


def rates_of(file: str) -> dict[str, list[str]]:
    """Returns lines of the table of docs/reproducing.md, with the cells of a kept report.

    A line's second cell is that of the line below it.
    """
    items = json.loads((REPOSITORY / "benchmarks" / file).read_text(encoding="utf-8"))["items"]
    language, ende, summaries, _ = items["table3"]["content"]
    lenient, _ = items["table5"]["content"]

    def alphas(rows):
        rows = [row for row in rows if row[3] in ("unigram", "bigram", "transformer")]
        return ", ".join(f"{row[4]:.3f}".removeprefix("0") for row in rows)

    def at_both(table):
        return [alphas(row for row in table["rows"] if row[1] == each) for each in (0, 1)]

    small = alphas(row for row in lenient["rows"] if row[3] == "transformer")
    return {
        "Table 3, EnDe, T = 0": at_both(ende),
        "summaries, T = 0": at_both(summaries),
        "GPT-like (ours: after three words), T = 0": at_both(language),
        "Table 5, small": [small],
    }


@pytest.mark.parametrize(
    ("column", "file", "data"),
    [(2, "reproduction_package.json", None), (3, "reproduction_quick.json", "data")],
)
def test_the_rates_of_a_clone_and_those_held_out_are_the_kept_ones(column, file, data):
    kept = json.loads((REPOSITORY / "benchmarks" / file).read_text(encoding="utf-8"))
    assert kept["run"]["data_dir"] == data
    lines = (REPOSITORY / "docs" / "reproducing.md").read_text(encoding="utf-8").splitlines()
    for start, rates in rates_of(file).items():
        first = next(at for at, line in enumerate(lines) if line.startswith(f"| {start}"))
        below = lines[first : first + len(rates)]
        assert [line.strip("| ").split(" | ")[column] for line in below] == rates


def test_the_table_of_chips_has_every_chip():
    text = (REPOSITORY / "docs" / "tpu_and_gpu.md").read_text(encoding="utf-8")
    for name, chip in CHIPS.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} | `{name}:")]
        flops, memory, bandwidth, link = (
            float(cell.replace(",", "")) for cell in line.strip("| ").split(" | ")[2:]
        )
        peaks = (chip.flops / 1e12, chip.memory / 2**30, chip.memory_bandwidth / 1e9)
        assert (flops, memory, bandwidth, link) == (*peaks, chip.link_bandwidth / 1e9)


def test_the_figure_of_growth_has_every_walk():
    rows = json.loads((REPOSITORY / "benchmarks" / "growth.json").read_text())["rows"]
    figure = plot_growth.draw(rows)
    assert len(figure.axes) == 3
    for panel in figure.axes:
        measured, predicted, _ = panel.lines
        assert len(measured.get_xdata()) == len(predicted.get_xdata()) >= 1
        assert list(measured.get_xdata()) == sorted(measured.get_xdata())
