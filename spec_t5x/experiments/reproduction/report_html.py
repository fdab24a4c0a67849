"""The report as one HTML page that needs nothing but the figures beside it."""

import html
import itertools
import re
from collections.abc import Iterator, Sequence

from spec_t5x.experiments.reproduction.page_style import CSS, SYMBOLS
from spec_t5x.experiments.reproduction.pictures import Picture
from spec_t5x.experiments.reproduction.report import (
    LEGEND,
    PAPER,
    PAPER_URL,
    Entry,
    Report,
    format_cell,
    origins_of,
)
from spec_t5x.experiments.reproduction.sections import Column, Drawing, Origin, Plot, Table

_TITLE = "The paper, reproduced"
_STATES = {"complete": "✓", "in part": "◐", "not computed": "✗"}


def to_html(report: Report) -> str:
    """The whole page."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_TITLE}</title>",
            # Else a browser asks for favicon.ico, which is not there.
            '<link rel="icon" href="data:,">',
            f"<style>{CSS}</style>",
            "</head>",
            "<body>",
            *_header(report),
            "<main>",
            *(line for entry in report.entries for line in _section(entry, report)),
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _text(text: str) -> str:
    """Escaped; what stands in backticks is code, and ^(…) an exponent."""
    text = re.sub(r"\^\(([^()]+)\)", r"<sup>\1</sup>", html.escape(text))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def _badge(origin: Origin) -> str:
    return (
        f'<span class="badge {origin.name.lower()}">'
        f'<span aria-hidden="true">{SYMBOLS[origin]}</span> {html.escape(origin)}</span>'
    )


def _header(report: Report) -> Iterator[str]:
    yield "<header>"
    yield f"<h1>{_TITLE}</h1>"
    yield f'<p class="lead">{html.escape(PAPER)} (<a href="{PAPER_URL}">arXiv 2211.17192</a>).</p>'
    yield '<dl class="facts">'
    for name, value in report.facts():
        yield f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
    yield "</dl>"
    yield "<h2>How every number came about</h2>"
    yield '<dl class="legend">'
    for origin, meaning in LEGEND.items():
        yield f"<div><dt>{_badge(origin)}</dt><dd>{html.escape(meaning)}</dd></div>"
    yield "</dl>"
    yield "<h2>Contents</h2>"
    yield '<nav aria-label="Contents"><ol class="contents">'
    for entry in report.entries:
        yield from _contents_line(entry)
    yield "</ol></nav>"
    yield "</header>"


def _contents_line(entry: Entry) -> Iterator[str]:
    state = entry.state
    yield f'<li class="{state.replace(" ", "-")}">'
    yield f'<a href="#{entry.item.name}">{html.escape(entry.item.title)}</a>'
    yield f'<span class="state"><span aria-hidden="true">{_STATES[state]}</span> {state}</span>'
    if entry.section is not None and entry.section.finding:
        yield f"<p>{_text(entry.section.finding)}</p>"
    for reason in _reasons(entry):
        yield f"<p>{reason}</p>"
    yield "</li>"


def _reasons(entry: Entry) -> Iterator[str]:
    reasons = entry.problems if entry.unavailable is None else (entry.unavailable,)
    for reason in reasons:
        yield f"Not computed: {html.escape(reason)}"


def _section(entry: Entry, report: Report) -> Iterator[str]:
    yield f'<section id="{entry.item.name}">'
    yield f"<h2>{html.escape(entry.item.title)}</h2>"
    for reason in _reasons(entry):
        yield f'<p class="gap">{reason}</p>'
    if entry.section is not None:
        for paragraph in entry.section.paragraphs:
            yield f"<p>{_text(paragraph)}</p>"
        for content in entry.section.content:
            if isinstance(content, Table):
                yield from _table(content)
            else:
                yield from _figure(content, entry.pictures[content.name])
            for line in entry.sources(content):
                yield f'<p class="source">Made here: {html.escape(line)}.</p>'
    yield f'<p class="source">Again: <code>{html.escape(report.command(entry))}</code></p>'
    yield "</section>"


# --- tables ------------------------------------------------------------------


def _table(table: Table) -> Iterator[str]:
    # Reached with the keyboard, for it may have to be scrolled.
    label = html.escape(table.caption, quote=True)
    yield f'<div class="scroll" role="region" tabindex="0" aria-label="{label}">'
    yield "<table>"
    yield f"<caption>{_text(table.caption)}</caption>"
    yield "<thead>"
    yield "<tr>"
    for origin, columns in itertools.groupby(table.columns, key=lambda column: column.origin):
        yield _group(origin, len(list(columns)))
    yield "</tr>"
    yield "<tr>"
    for column, numeric in zip(table.columns, _numeric(table), strict=True):
        yield f'<th scope="col"{_class(column, numeric)}>{_text(column.title)}</th>'
    yield "</tr>"
    yield "</thead>"
    yield "<tbody>"
    for before, row in itertools.pairwise([None, *table.rows]):
        yield from _row(table, row, before is not None and before[0] != row[0])
    yield "</tbody>"
    yield "</table>"
    yield "</div>"
    for note in table.notes:
        yield f'<p class="note">{_text(note)}</p>'


def _group(origin: Origin, width: int) -> str:
    """The cell over neighbouring columns of one origin."""
    span = f' colspan="{width}"' if width > 1 else ""
    if origin is Origin.LABEL:
        return f"<td{span}></td>"
    return f'<th scope="colgroup"{span} class="{origin.name.lower()}">{_badge(origin)}</th>'


def _row(
    table: Table, row: Sequence[float | int | str | None], begins_block: bool
) -> Iterator[str]:
    yield '<tr class="block">' if begins_block else "<tr>"
    for place, (column, value) in enumerate(zip(table.columns, row, strict=True)):
        tag = 'th scope="row"' if place == 0 else "td"
        text = _text(format_cell(value, column.format))
        numeric = isinstance(value, int | float)
        yield f"<{tag}{_class(column, numeric)}>{text}</{tag.split()[0]}>"
    yield "</tr>"


def _numeric(table: Table) -> list[bool]:
    """Of each column: whether numbers stand in it."""
    return [
        any(isinstance(value, int | float) for value in values)
        for values in (zip(*table.rows, strict=True) if table.rows else ((),) * len(table.columns))
    ]


def _class(column: Column, numeric: bool) -> str:
    classes = [column.origin.name.lower()] * (column.origin is not Origin.LABEL)
    classes += ["number"] * numeric
    return f' class="{" ".join(classes)}"' if classes else ""


# --- figures -----------------------------------------------------------------


def _figure(content: Plot | Drawing, picture: Picture) -> Iterator[str]:
    links = [("SVG", picture.svg)]
    if picture.png:
        links.append(("PNG", picture.png))
    links += list(picture.files.items())
    caption = html.escape(content.caption, quote=True)
    yield "<figure>"
    yield f'<img src="{html.escape(picture.svg, quote=True)}" alt="{caption}">'
    yield "<figcaption>"
    yield _text(content.caption)
    yield f'<div class="beside">{" ".join(map(_badge, origins_of(content)))}'
    anchors = [f'<a href="{html.escape(to, quote=True)}">{html.escape(n)}</a>' for n, to in links]
    yield f"<span>{' · '.join(anchors)}</span></div>"
    yield "</figcaption>"
    yield "</figure>"
