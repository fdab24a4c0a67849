"""The report's files: every row, every origin, nothing unescaped, figures that are figures."""

import json
import re
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread

from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.labs.reproduction import run as running
from spec_t5x.labs.reproduction.closed_forms import TABLE_1
from spec_t5x.labs.reproduction.contents import ReproduceOptions
from spec_t5x.labs.reproduction.curves import FIGURE_2
from spec_t5x.labs.reproduction.report import LEGEND

ORIGINS = {str(origin) for origin in LEGEND}


@pytest.fixture(scope="module")
def page(report):
    """Provides the page, which is XML: every tag is closed, in order."""
    return ElementTree.parse(report / "report.html").getroot()


@pytest.fixture(scope="module")
def rows(page):
    """Provides the texts of the cells of all tables."""
    return [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]


@pytest.fixture(scope="module")
def results(report):
    return json.loads((report / "results.json").read_text(encoding="utf-8"))


def tables(results):
    return [c for item in results["items"].values() for c in item["content"] if "table" in c]


def test_the_rows_of_the_paper_are_there(rows):
    shown = set(map(tuple, rows))
    for row in paper_tables.TABLE_1:
        numbers = (f"{row.operations:.2f}", f"{row.speed:.2f}") * 2
        assert (f"{row.alpha:g}", str(row.gamma), *numbers, "yes") in shown


def test_every_column_says_its_origin(page, rows, results):
    assert len(tables(results)) == len(list(page.iter("table"))) == 6
    for table in tables(results):
        assert {column["origin"] for column in table["columns"]} <= ORIGINS | {""}
    # In the page, a cell over the columns names it.
    assert {cell[2:] for row in rows for cell in row if cell[2:] in ORIGINS} == ORIGINS
    groups = rows.index(["", "ƒ closed form", "¶ the paper's", ""])
    assert rows[groups + 1][:3] == ["α", "γ", "operations, ×"]


def test_measured_numbers_have_machine_commit_seed_tokens_and_date(report, results):
    html = (report / "report.html").read_text(encoding="utf-8")
    lines = re.findall(r"Measured here: (.*?)\.</p>", html)
    # The measured table has it; closed forms do not.
    (line,) = lines
    assert re.search(r"\d+ cores \(cpu\), (commit [0-9a-f]{12}|not from a checkout)", line)
    assert re.search(r"seed 0, 4,321 tokens counted, \d{4}-\d\d-\d\d, took \d+ s", line)
    provenance = results["items"]["table2"]["measured"]["table2/ende/transformer/t0"]
    assert provenance["machine"]["jax"] and provenance["machine"]["processor"]


def test_the_pages_links_lead_somewhere(page, report):
    tags = [element.tag for element in page.iter()]
    assert tags.count("h1") == tags.count("main") == 1
    ids = [element.get("id") for element in page.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    links = [link.get("href") for link in page.iter("a")]
    images = list(page.iter("img"))
    assert len(images) == 5 and all(image.get("alt") for image in images)
    for target in links + [image.get("src") for image in images]:
        if not target.startswith(("#", "https://")):
            assert (report / target).is_file()
    assert {link[1:] for link in links if link.startswith("#")} == set(ids)


def test_texts_are_escaped(page, rows):
    # The hostile texts add no tags.
    assert not list(page.iter("b")) and all(link.get("href") for link in page.iter("a"))
    (row,) = [row for row in rows if row[-1] == "0.13"]
    assert row[0] == "a <b>|bar|</b> & x|y *stars* _under_ [link](to) \\ # $x^2$"
    assert ["empty", "—", "inf"] in rows


def test_the_results_hold_unrounded_numbers(results):
    (table,) = results["items"]["table1"]["content"]
    assert table["rows"][0][3] == 1 + 0.6 + 0.6**2
    hostile, trace = results["items"]["hostile"]["content"]
    assert hostile["rows"][1] == ["empty", None, "inf"]
    assert trace["lines"][0]["rejected"] == "x" and trace["lines"][1]["accepted"] == ["[END]"]
    assert results["run"]["seed"] == 0


def test_plots_are_png_and_svg(report):
    names = {"figure2", "figure3", "figure4_speed", "figure4_operations", "figure5"}
    assert {path.stem for path in (report / "figures").iterdir()} == names
    for name in names:
        height, width, _ = imread(report / "figures" / f"{name}.png").shape
        assert width >= 1000 and height >= 400
        root = ElementTree.parse(report / "figures" / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_numbers_give_the_same_pictures(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for output in (first, second):
        running.reproduce({"figure2": FIGURE_2}, ReproduceOptions(), output)
    names = [path.name for path in (first / "figures").iterdir()]
    assert len(names) == 2
    for name in names:
        one, other = (output / "figures" / name for output in (first, second))
        assert one.read_bytes() == other.read_bytes()


def test_the_report_names_the_run_without_paths(tmp_path):
    output, data = tmp_path / "out", tmp_path / "texts"
    for name in ("ende/dev.tsv.gz", "summarize/debian_dev.tsv.gz"):
        (data / name).parent.mkdir(parents=True)
        (data / name).touch()
    options = ReproduceOptions(quick=True, seed=4, data_dir=data)
    assert running.reproduce({"table1": TABLE_1}, options, output) == 0
    html = (output / "report.html").read_text(encoding="utf-8")
    assert "quick, seed 4, texts in texts" in html
    for name in ("report.html", "results.json"):
        assert str(tmp_path) not in (output / name).read_text(encoding="utf-8")
