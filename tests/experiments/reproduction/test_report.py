"""The report's files: every row, every origin, nothing unescaped, figures that are figures."""

import io
import json
import re
import struct
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from spec_t5x.experiments import paper_tables
from spec_t5x.experiments.reproduction.closed_forms import TABLE_1, no_parts
from spec_t5x.experiments.reproduction.curves import figure_2
from spec_t5x.experiments.reproduction.items import Done, Item, Setting
from spec_t5x.experiments.reproduction.pictures import save
from spec_t5x.experiments.reproduction.report import LEGEND, provenance_lines
from spec_t5x.experiments.reproduction.run import Request, reproduce
from spec_t5x.experiments.reproduction.sections import Drawing, Origin, Section

VOID = {"meta", "link", "img", "br"}
ORIGINS = {str(origin) for origin in LEGEND}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what stands in the page."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[dict] = []
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if tag == "a" else []
        self.images += [attributes] if tag == "img" else []
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        # Of Markdown's readers, who write <img />.
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def page(report):
    return Page((report / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def markdown(report):
    return (report / "report.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def results(report):
    return json.loads((report / "results.json").read_text(encoding="utf-8"))


def tables(results):
    return [c for item in results["items"].values() for c in item["content"] if "table" in c]


def test_the_rows_of_the_paper_are_there(page, markdown):
    shown = {tuple(row) for row in page.rows}
    for row in paper_tables.TABLE_1:
        figures = (f"{row.operations:.2f}", f"{row.speed:.2f}") * 2
        cells = (f"{row.alpha:g}", str(row.gamma), *figures, "yes")
        assert cells in shown
        assert f"| {' | '.join(cells)} |" in markdown
    for row in paper_tables.TABLE_2:
        of_paper = [f"{row.alpha:.2f}", f"{row.c:.2f}"]
        first = [row.task, f"T5-{row.draft}", f"{row.temperature:g}", str(row.gamma), *of_paper]
        ends = [f"{row.expected:.1f}", f"{row.measured:.1f}"]
        assert any(list(cells[:6]) == first and list(cells[8:10]) == ends for cells in shown)


def test_every_column_says_its_origin(page, markdown, results, report):
    assert len(tables(results)) >= 7
    for table in tables(results):
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
        for column in table["columns"]:
            assert column["origin"] in ORIGINS | {""}
            if column["origin"] and column["title"] != "count":
                assert f"{column['title']} ({column['origin']}) |" in markdown
    # In the page, a cell in words over the columns, as wide as they are.
    over = [cell[2:] for row in page.rows for cell in row if cell[2:] in ORIGINS]
    assert set(over) == ORIGINS
    groups = page.rows.index(["", "ƒ closed form", "¶ the paper's", ""])
    assert page.rows[groups + 1][:3] == ["α", "γ", "operations, ×"]
    html = (report / "report.html").read_text(encoding="utf-8")
    assert '<td colspan="2"></td>\n<th scope="colgroup" colspan="2" class="closed_form">' in html


def test_measured_figures_say_machine_commit_seed_tokens_and_date(report, results):
    html = (report / "report.html").read_text(encoding="utf-8")
    lines = re.findall(r"Made here: (.*?)\.</p>", html)
    # Of the measured table and the points over three figures; not of closed forms.
    assert len(lines) == 6
    for line in lines:
        assert re.search(r"\d+ cores \(cpu\), (commit [0-9a-f]{12}|no commit)", line)
        assert re.search(r"seed 0, 4,321 tokens counted, \d{4}-\d\d-\d\d, took \d+ s", line)
    provenance = results["items"]["table4"]["parts"]["table2/made-up"]
    assert provenance["versions"]["jax"] and provenance["machine"]["processor"]


def test_the_page_is_well_formed_and_its_links_lead_somewhere(page, report):
    assert page.tags.count("h1") == 1 and page.tags.count("main") == 1
    assert len(page.ids) == len(set(page.ids))
    assert len(page.images) == 5
    for target in page.links + [image["src"] for image in page.images]:
        if target.startswith("#"):
            assert target[1:] in page.ids
        elif not target.startswith("https://"):
            assert (report / target).is_file()
    assert all(image["alt"] for image in page.images)
    inside = {link[1:] for link in page.links if link.startswith("#")}
    assert inside == set(page.ids)


def test_texts_are_escaped(page, markdown):
    # The hostile texts bring no tags of their own.
    assert "b" not in page.tags and page.tags.count("a") == len(page.links)
    assert not any(link == "to" for link in page.links)
    code = [row for row in page.rows if row and row[0].startswith("a <b>|bar|</b> & ")]
    assert [len(row) for row in code] == [3, 3]
    assert ["empty", "", "inf"] in page.rows

    html = MarkdownIt("commonmark").enable("table").render(markdown)
    read = Page(html)
    assert not {"b", "em"} & set(read.tags)
    assert "to" not in read.links
    (row,) = [row for row in read.rows if row[-1] == "0.13"]
    assert row[0] == "a <b>|bar|</b> & x|y *stars* _under_ [link](to) \\ # $x^2$"


def test_markdown_is_read_as_tables_figures_and_sections(page, markdown, results, report):
    read = Page(MarkdownIt("commonmark").enable("table").render(markdown))
    assert read.tags.count("table") == len(tables(results)) == page.tags.count("table")
    assert read.tags.count("h2") == 2 + len(results["items"])
    # A drawing that has a text is shown as text.
    assert len(read.images) == len(page.images) - 1
    assert "````\n``` a line\n````" in markdown
    for image in read.images:
        assert (report / image["src"]).is_file()
    # Without the groups' row over it, each table has the page's cells.
    of_page = [row for row in page.rows if not any(cell[2:] in ORIGINS for cell in row)]
    origin = re.compile(f" \\(({'|'.join(ORIGINS)})\\)$")
    assert [[origin.sub("", cell) for cell in row] for row in read.rows] == of_page


def test_numbers_stand_unrounded_in_the_results(results):
    (table,) = results["items"]["table1"]["content"]
    assert table["rows"][0][3] == 1 + 0.6 + 0.6**2
    hostile = results["items"]["hostile"]["content"][0]
    assert hostile["rows"][1] == ["empty", None, "inf"]
    assert results["run"]["seed"] == 0


def test_plots_are_png_and_svg(report):
    names = {"figure2", "figure3", "figure4_speed", "figure4_operations"}
    assert {path.stem for path in (report / "figures").glob("*.png")} == names
    for name in names:
        png = (report / "figures" / f"{name}.png").read_bytes()
        assert png[:8] == b"\x89PNG\r\n\x1a\n" and png[-8:-4] == b"IEND"
        width, height = struct.unpack(">II", png[16:24])
        assert width >= 1000 and height >= 600
        root = ElementTree.parse(report / "figures" / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 20
    assert (report / "figures" / "line.txt").read_text() == "a line"


def test_the_same_figures_give_the_same_files(report, tmp_path):
    (plot,) = figure_2(no_parts).render(Setting(), {}).content
    written = []
    for name in ("a", "b"):
        save(plot, tmp_path / name)
        figures = (tmp_path / name / "figures").iterdir()
        written.append({path.name: path.read_bytes() for path in figures})
    assert written[0] == written[1] and len(written[0]) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"svg": "<svg"}, "the drawing d is no XML"),
        ({"svg": "<p/>"}, "the drawing d is p, no SVG"),
        ({"name": "../d"}, r"named '\.\./d': give a plain name"),
        ({"files": {"a/b": ""}}, "named 'a/b': give a plain name"),
    ],
)
def test_a_drawing_that_is_none_is_reported(tmp_path, values, message):
    svg = '<svg xmlns="http://www.w3.org/2000/svg"/>'
    drawing = Drawing(
        **{"name": "d", "caption": "c", "origins": (Origin.MEASURED,), "svg": svg, **values}
    )
    with pytest.raises(ValueError, match=message):
        save(drawing, tmp_path)
    item = Item(
        name="one",
        title="one",
        parts=lambda setting: (),
        render=lambda setting, done: Section(title="one", content=(drawing,)),
    )
    stream = io.StringIO()
    request = Request(items=[item], setting=Setting(), output=tmp_path / "out")
    assert reproduce(request, stream) == 1
    assert re.search(f"one not computed: .*{message}", stream.getvalue())


def test_results_of_several_machines_are_told_apart():
    def done(processor, tokens, date, **values):
        machine = {"device": "cpu", "platform": "cpu", "processor": processor, "cores": 2}
        provenance = {"machine": machine, "commit": "abc", "seed": 1, "quick": False}
        provenance |= {"date": f"{date} 10:00:00 UTC", "seconds": 70.0} | values
        return Done(result={"tokens": tokens}, provenance=provenance)

    lines = provenance_lines(
        [
            done("X", 1000, "2025-01-02"),
            done("X", 234, "2025-01-01"),
            done("Y", 5, "2025-01-03", quick=True, commit=None),
        ]
    )
    assert lines == [
        "X, 2 cores (cpu), commit abc, seed 1, 1,234 tokens counted, 2025-01-01 to 2025-01-02, "
        "took 2 min",
        "Y, 2 cores (cpu), no commit: not from a checkout, seed 1, quick run, 5 tokens counted, "
        "2025-01-03, took 70 s",
    ]


def test_each_section_says_what_computes_it_again(tmp_path):
    output, data = tmp_path / "out", tmp_path / "texts"
    for name in ("ende/dev.tsv.gz", "summarize/debian_dev.tsv.gz"):
        (data / name).parent.mkdir(parents=True)
        (data / name).touch()
    request = Request(
        items=[TABLE_1],
        setting=Setting(quick=True, seed=4, data_dir=data),
        output=output,
    )
    assert reproduce(request, io.StringIO()) == 0
    html = (output / "report.html").read_text(encoding="utf-8")
    command = "spec-t5x reproduce table1 --output DIR --quick --seed 4 --data_dir texts"
    assert f"Again: <code>{command}</code>" in html
    assert "quick, seed 4, texts in texts" in html
    # Where the files were is nobody else's business.
    for name in ("report.html", "report.md", "results.json"):
        assert str(tmp_path) not in (output / name).read_text(encoding="utf-8")
