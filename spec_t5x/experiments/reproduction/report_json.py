"""The report's numbers as JSON, each column with its origin."""

import json
import math

from spec_t5x.experiments.reproduction.items import Json
from spec_t5x.experiments.reproduction.report import Entry, Report, origins_of
from spec_t5x.experiments.reproduction.sections import Drawing, Plot, Table


def to_json(report: Report) -> str:
    """All tables, unrounded; figures by their files."""
    setting = report.setting
    content = {
        "run": {
            **report.origin,
            "date": report.date,
            "quick": setting.quick,
            "seed": setting.seed,
            # Where the files were is nobody else's business.
            "data_dir": setting.data_dir and setting.data_dir.name,
        },
        "items": {entry.item.name: _entry(entry) for entry in report.entries},
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _entry(entry: Entry) -> dict[str, Json]:
    section = entry.section
    return {
        "title": entry.item.title,
        "state": entry.state,
        "not_computed": [*entry.problems, *filter(None, [entry.unavailable])],
        "finding": section.finding if section else "",
        "content": [_content(entry, content) for content in section.content] if section else [],
        "parts": {name: done.provenance for name, done in entry.done.items()},
    }


def _content(entry: Entry, content: Table | Plot | Drawing) -> dict[str, Json]:
    if isinstance(content, Table):
        return {
            "table": content.caption,
            "columns": [{"title": c.title, "origin": str(c.origin)} for c in content.columns],
            "rows": [[_value(value) for value in row] for row in content.rows],
            "parts": list(content.parts),
        }
    picture = entry.pictures[content.name]
    return {
        "figure": content.caption,
        "origins": [str(origin) for origin in origins_of(content)],
        "files": [picture.svg, *filter(None, [picture.png]), *picture.files.values()],
        "parts": list(content.parts),
    }


def _value(value: float | int | str | None) -> float | int | str | None:
    """As JSON has it: infinity is a text there."""
    if isinstance(value, str) or value is None or math.isfinite(value):
        return value
    return str(value)
