"""The report as Markdown, with tables as GitHub reads them."""

import re
from collections.abc import Iterator

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

_CODE = re.compile(r"(`[^`]+`)")
_SPECIAL = re.compile(r"([\\*_\[\]<>|#~&])")


def to_markdown(report: Report) -> str:
    """The whole report."""
    lines = ["# The paper, reproduced", "", f"{_text(PAPER)} (<{PAPER_URL}>).", ""]
    lines += [f"- {name}: {_text(value)}" for name, value in report.facts()]
    lines += ["", "## How every number came about", ""]
    lines += [f"- **{origin}**: {_text(meaning)}" for origin, meaning in LEGEND.items()]
    lines += ["", "## Summary", ""]
    lines += [_summary(entry) for entry in report.entries]
    for entry in report.entries:
        lines += ["", *_section(entry)]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """With what Markdown would read as marks escaped, but for code in backticks."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(
        part if place % 2 else _SPECIAL.sub(r"\\\1", part).replace("`", "\\`")
        for place, part in enumerate(parts)
    )


def _cell(text: str) -> str:
    # In a table even code must not hold a bare bar.
    return re.sub(r"(?<!\\)\|", r"\\|", _text(text))


def _summary(entry: Entry) -> str:
    told = [entry.section.finding] if entry.section is not None and entry.section.finding else []
    told += [f"Not computed: {reason}" for reason in _reasons(entry)]
    return f"- **{_text(entry.item.title)}** ({entry.state}). {_text(' '.join(told))}".rstrip()


def _reasons(entry: Entry) -> tuple[str, ...]:
    return entry.problems if entry.unavailable is None else (entry.unavailable,)


def _section(entry: Entry) -> Iterator[str]:
    yield f"## {_text(entry.item.title)}"
    yield ""
    for reason in _reasons(entry):
        yield from (f"**Not computed:** {_text(reason)}", "")
    if entry.section is None:
        return
    for paragraph in entry.section.paragraphs:
        yield from (_text(paragraph), "")
    for content in entry.section.content:
        if isinstance(content, Table):
            yield from _table(content)
        else:
            yield from _figure(content, entry.pictures[content.name])
        for line in entry.sources(content):
            yield from (f"Made here: {_text(line)}.", "")


def _table(table: Table) -> Iterator[str]:
    yield from (f"**{_text(table.caption)}**", "")
    yield _line(_heading(column) for column in table.columns)
    numeric = [
        any(isinstance(row[place], int | float) for row in table.rows)
        for place in range(len(table.columns))
    ]
    yield _line("--:" if right else "---" for right in numeric)
    for row in table.rows:
        cells = zip(row, table.columns, strict=True)
        yield _line(_cell(format_cell(value, column.format)) for value, column in cells)
    yield ""
    for note in table.notes:
        yield from (_text(note), "")


def _heading(column: Column) -> str:
    """The title and, in words, where the column comes from."""
    title = _cell(column.title)
    return title if column.origin is Origin.LABEL else f"{title} ({column.origin})"


def _line(cells: Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(content: Plot | Drawing, picture: Picture) -> Iterator[str]:
    if isinstance(content, Drawing) and content.text is not None:
        # Longer than any run of backticks in the text.
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", content.text)), default=0))
        yield from (fence, *content.text.splitlines(), fence, "")
    else:
        yield from (f"![{_text(content.caption)}]({picture.png or picture.svg})", "")
    origins = ", ".join(origins_of(content))
    files = [("SVG", picture.svg), *picture.files.items()]
    links = ", ".join(f"[{_text(name)}]({path})" for name, path in files)
    yield from (f"{_text(content.caption)} ({origins}; {links})", "")
