"""Text pairs in files of JSON objects, one a line, gzipped or not."""

from collections.abc import Iterator
from pathlib import Path

from spec_t5x.data.text_files import json_object, text_lines
from spec_t5x.errors import InputError


def read_json_pairs(
    path: str | Path, source_field: str, target_field: str
) -> Iterator[tuple[str, str]]:
    """Yields (source, target) of every line, stripped of surrounding white space.

    Args:
        path: JSON lines, gzipped or not; other fields and empty lines are ignored.
        source_field, target_field: the fields' names ("article", "highlights").

    Raises:
        InputError: the file is absent, empty or not UTF-8, or a line is no JSON object
            with both fields, of which both are texts.
    """
    pairs = 0
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        try:
            values = json_object(line)
            yield _text(values, source_field), _text(values, target_field)
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        pairs += 1
    if not pairs:
        raise InputError(f"{path} is empty: give a file with at least one line")


def _text(values: dict, field: str) -> str:
    if not isinstance(values.get(field), str):
        raise InputError(
            f"field {field!r} is {values.get(field)!r}, not a text: fix the line, or name another "
            f"of its fields ({', '.join(values)})"
        )
    return values[field].strip()
