"""Texts in tab-separated files and in files of JSON objects, one a line, gzipped or not."""

import string
from collections.abc import Iterator, Sequence
from pathlib import Path

from spec_t5x.data.text_files import json_object, text_lines
from spec_t5x.errors import InputError

# The characters that tf.strings.strip removes, so that seqio tasks read the same texts. str.strip
# alone would also remove no-break spaces.
_BLANKS = string.whitespace
# Columns of source and target by the number of columns: a text alone, a pair, and a tag, a name or
# the like before the pair.
_USUAL = {1: (0, 0), 2: (0, 1)}
_TAGGED = (1, 2)


def read_pairs(
    path: str | Path,
    source_column: int | None = None,
    target_column: int | None = None,
    num_columns: int | None = None,
) -> Iterator[tuple[str, str]]:
    """Yields (source, target) of every line, stripped of surrounding spaces.

    The file is tab-separated, gzipped or not, without header or quoting. Columns count from 0; None
    is the usual one: of two columns the first and the second, of more the second and the third, of
    one the only one. Every line must have ``num_columns``, None for those of the first.

    Raises:
        InputError: the file is absent, empty or not UTF-8, a column is outside of
            0..num_columns - 1, or a line has another number of columns.
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
    """Yields these columns of every line; the arguments and errors of ``read_pairs``."""
    for column in columns:
        if not 0 <= column < num_columns:
            raise InputError(f"column {column} of {num_columns}: give one of 0..{num_columns - 1}")
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
    """Yields the texts of the files' columns in order, stripped, without the empty ones.

    Raises:
        InputError: as ``read_columns``, or no file or no column is given.
    """
    if not files or not columns:
        raise InputError(f"files are {list(files)}, columns {list(columns)}: give at least one")
    rows = (row for file in files for row in read_columns(file, columns, num_columns))
    return (text for row in rows for text in row if text)


def read_json_pairs(
    path: str | Path, source_field: str, target_field: str
) -> Iterator[tuple[str, str]]:
    """Yields (source, target) of every line of JSON, stripped of surrounding white space.

    Other fields and empty lines are ignored.

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
