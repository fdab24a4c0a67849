"""Text pairs in files of JSON objects, one a line, gzipped or not."""

import json
from collections.abc import Iterator
from pathlib import Path

from spec_t5x.data.tsv import text_lines
from spec_t5x.errors import InputError


def is_jsonl(path: str | Path) -> bool:
    """Whether the file's name says that it holds JSON lines."""
    return str(path).removesuffix(".gz").endswith((".jsonl", ".json"))


def read_json_pairs(
    path: str | Path, source_field: str, target_field: str
) -> Iterator[tuple[str, str]]:
    """Yields (source, target) of every line, stripped of surrounding white space.

    Args:
        path: JSON lines, gzipped or not; other fields are passed over, empty lines too.
        source_field, target_field: the fields' names ("article", "highlights").

    Raises:
        InputError: the file is absent, empty or not UTF-8, or a line is no JSON object
            with both fields, of which both are texts.
    """
    pairs = 0
    for number, line in enumerate(text_lines(path), start=1):
        if line.strip():
            pairs += 1
            yield _pair(line, f"{path}, line {number}", source_field, target_field)
    if not pairs:
        raise InputError(f"{path} is empty: give a file with at least one line")


def _pair(line: str, where: str, *fields: str) -> tuple[str, ...]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: no JSON ({error}): mend the line") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: {line.strip()[:40]!r} is no JSON object: mend the line")
    for field in fields:
        if not isinstance(value.get(field), str):
            raise InputError(
                f"{where}: field {field!r} is {value.get(field)!r}, no text: mend the line, or "
                f"name another of its fields ({', '.join(value)})"
            )
    return tuple(value[field].strip() for field in fields)
