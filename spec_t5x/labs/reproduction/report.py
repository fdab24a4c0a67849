"""The report of a run: ``report.html``, ``results.json`` and its figures."""

import dataclasses
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import matplotlib

from spec_t5x.labs.reproduction import kept_results
from spec_t5x.labs.reproduction.contents import Origin, ReportFigure, ReportTable
from spec_t5x.machine.atomic import write_whole

# Symbol and meaning of each origin, in order; a symbol, since not all readers see colours.
LEGEND = {
    Origin.CLOSED_FORM: ("ƒ", "computed by this package from the paper's formulas"),
    Origin.MEASURED: ("●", "measured on the machine and at the commit named beside it"),
    Origin.COMPILED: (
        "▦",
        "from programs that the TPU's compiler made here, without a TPU: a prediction",
    ),
    Origin.PAPER: ("¶", "printed in the paper"),
}
_DOTS_PER_INCH = 160

Sections = Sequence[Mapping[str, Any]]


def write(output: Path, sections: Sections, origin: Mapping[str, Any]) -> None:
    """Writes ``report.html``, ``results.json`` and ``figures/`` of a run to the folder ``output``.

    ``kept_results.origin`` makes ``origin``. A section has an item's name, title, content (tables
    and figures), ``not_computed`` (reasons) and ``measured`` (result and provenance by name).

    Raises:
      OSError: a file cannot be written.
    """
    (output / "figures").mkdir(parents=True, exist_ok=True)
    for section in sections:
        for content in section["content"]:
            if isinstance(content, ReportFigure) and content.plot:
                _save_plot(output / "figures", content)
    run = {**origin, "date": kept_results.now()}
    write_whole(output / "report.html", [_html(sections, run).encode()])
    write_whole(output / "results.json", [_json(sections, run).encode()])


def _save_plot(folder: Path, figure: ReportFigure) -> None:
    svg, png = io.BytesIO(), io.BytesIO()
    # No date and no random ids, so that the same data give the same file.
    with matplotlib.rc_context({"svg.hashsalt": figure.name}):
        figure.plot.savefig(svg, format="svg", metadata={"Date": None})
    figure.plot.savefig(png, format="png", dpi=_DOTS_PER_INCH)
    write_whole(folder / f"{figure.name}.svg", [svg.getvalue()])
    write_whole(folder / f"{figure.name}.png", [png.getvalue()])


def _origins(content: ReportTable | ReportFigure) -> list[Origin]:
    return [origin for origin in LEGEND if origin in content.origins]


def _html(sections: Sections, run: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["marked"] = _marked
    machine, texts = run["machine"], "of the package"
    if run["data_dir"]:
        texts = f"in {run['data_dir']}"
    if {section["name"] for section in sections} == {"public"}:
        texts = "of the pairs"
    facts = {
        "Machine": kept_results.describe(machine),
        "Software": f"spec_t5x {machine['spec_t5x'] or 'not installed'}, JAX {machine['jax']}, "
        f"Python {machine['python']}",
        "Commit": run["commit"] or "not from a checkout",
        "Run": f"{'quick' if run['quick'] else 'full'}, seed {run['seed']}, texts {texts}",
        "Written": run["date"],
    }
    return environment.get_template("report.html.jinja").render(
        facts=facts,
        legend=LEGEND,
        sections=sections,
        origins=_origins,
        cells=_cells,
        numeric=_numeric,
        groups=lambda table: [
            (origin, len(list(columns)))
            for origin, columns in groupby(table.columns, key=lambda column: column.origin)
        ],
        lines=lambda section: kept_results.lines(section["measured"].values()),
    )


def _cells(table: ReportTable) -> list[list[str]]:
    formats = [column.format for column in table.columns]
    return [
        [
            "—" if value is None else value if isinstance(value, str) else format(value, form)
            for value, form in zip(row, formats, strict=True)
        ]
        for row in table.values
    ]


def _numeric(table: ReportTable) -> list[bool]:
    """Returns a flag for each column: True if any of its cells is a number."""
    return [
        any(isinstance(row.get(column.key), int | float) for row in table.rows)
        for column in table.columns
    ]


def _marked(text: str) -> markupsafe.Markup:
    """Escapes a text for HTML; code in backticks and exponents in ^(…) become elements."""
    text = re.sub(r"\^\(([^()]+)\)", r"<sup>\1</sup>", str(markupsafe.escape(text)))
    return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", text))


def _json(sections: Sections, run: Mapping[str, Any]) -> str:
    items = {
        section["name"]: {
            "title": section["title"],
            "not_computed": section["not_computed"],
            "content": [_json_content(content) for content in section["content"]],
            "measured": {name: r["provenance"] for name, r in section["measured"].items()},
        }
        for section in sections
    }
    text = json.dumps({"run": run, "items": items}, indent=1, ensure_ascii=False, allow_nan=False)
    return text + "\n"


def _json_content(content: ReportTable | ReportFigure) -> dict[str, Any]:
    if isinstance(content, ReportTable):
        return {
            "table": content.caption,
            "columns": [{"title": c.title, "origin": str(c.origin)} for c in content.columns],
            # JSON has no infinity.
            "rows": [
                [str(v) if isinstance(v, float) and not math.isfinite(v) else v for v in row]
                for row in content.values
            ],
        }
    found = {"figure": content.caption, "origins": list(map(str, _origins(content)))}
    if content.trace:
        return found | {"lines": list(map(dataclasses.asdict, content.trace))}
    return found | {"files": [f"figures/{content.name}.{ending}" for ending in ("svg", "png")]}
