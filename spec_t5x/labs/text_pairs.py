"""Texts in tab-separated files and in files of one JSON object per line, gzipped or not."""

import string
from collections.abc import Iterator, Sequence
from pathlib import Path

from spec_t5x.data.text_files import json_object, raw_lines, text_of
from spec_t5x.errors import InputError, check_numbers

# The characters that tf.strings.strip removes, so that seqio tasks read the same texts. str.strip
# alone would also remove no-break spaces.
_BLANKS = string.whitespace
# Default (source, target) columns by the number of columns. Three or more have a tag or a name in
# the first, before the pair.
_USUAL = {1: (0, 0), 2: (0, 1)}
_TAGGED = (1, 2)


def text_lines(path: str | Path) -> Iterator[str]:
    """Yields the text of each line of a file, without line ends.

    Raises ``InputError`` if the file is absent, empty or cut short, or a line is not UTF-8.
    """
    number = 0
    for number, line in enumerate(raw_lines(path), start=1):
        try:
            text = text_of(line)
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        yield text
    if not number:
        raise InputError(f"{path} is empty: give a file with at least one line")


def read_pairs(
    path: str | Path,
    source_column: int | None = None,
    target_column: int | None = None,
    num_columns: int | None = None,
) -> Iterator[tuple[str, str]]:
    """Yields (source, target) of every line, stripped of surrounding ASCII white space.

    The file is tab-separated, gzipped or not, without header or quoting. Columns count from 0. By
    default they are 0 and 1 of two columns, 1 and 2 of three or more, and 0 for both of one. Every
    line must have ``num_columns`` columns, by default as many as the first line. Raises
    ``InputError`` if the file is absent, empty or not UTF-8, a column is not one of the
    ``num_columns``, or a line has another number of columns.
    """
    if num_columns is None:
        num_columns = next(text_lines(path)).count("\t") + 1
    usual = _USUAL.get(num_columns, _TAGGED)
    given = zip((source_column, target_column), usual, strict=True)
    columns = [default if column is None else column for column, default in given]
    return read_columns(path, columns, num_columns)


def read_columns(
    path: str | Path, columns: Sequence[int], num_columns: int
) -> Iterator[tuple[str, ...]]:
    """Yields the stripped texts of ``columns`` in every line, with ``read_pairs``'s errors."""
    check_numbers(1, num_columns=num_columns)
    for column in columns:
        if not 0 <= column < num_columns:
            raise InputError(f"column {column} of {num_columns}: give 0 to {num_columns - 1}")
    for number, line in enumerate(text_lines(path), start=1):
        found = line.split("\t")
        if len(found) != num_columns:
            raise InputError(
                f"{path}, line {number}: {len(found)} columns, not {num_columns}: separate "
                "them by tabs, or set num_columns"
            )
        yield tuple(found[column].strip(_BLANKS) for column in columns)


def read_lines(
    files: Sequence[str | Path], columns: Sequence[int] = (0,), num_columns: int = 1
) -> Iterator[str]:
    """Yields the non-empty texts of ``columns``, stripped, line by line and file by file.

    Raises ``InputError`` if ``files`` or ``columns`` is empty, or as ``read_columns`` does.
    """
    if not files or not columns:
        raise InputError(f"files are {list(files)}, columns {list(columns)}: give at least one")
    rows = (row for file in files for row in read_columns(file, columns, num_columns))
    return (text for row in rows for text in row if text)


def read_json_pairs(
    path: str | Path, source_field: str, target_field: str
) -> Iterator[tuple[str, str]]:
    """Yields (source, target), two fields of each line's JSON object, stripped of white space.

    Other fields and blank lines are ignored. Raises ``InputError`` if the file is absent, empty or
    not UTF-8, or a line is not a JSON object, or one of its two fields is absent or not a text.
    """
    pairs = 0
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        try:
            values = json_object(line)
            given = {"source_field": source_field, "target_field": target_field}
            source, target = (_text(values, name, option) for option, name in given.items())
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        yield source, target
        pairs += 1
    if not pairs:
        raise InputError(f"{path} is empty: give a file with at least one line")


def _text(values: dict, field: str, option: str) -> str:
    if not isinstance(values.get(field), str):
        what = f"is {values[field]!r}, not a text" if field in values else "is absent"
        raise InputError(
            f"field {field!r} {what}: fix the line, or name another of its fields "
            f"({', '.join(values)}) with {option}"
        )
    return values[field].strip()
