"""Texts in tab-separated files, gzipped or not."""

import string
from collections.abc import Iterator, Sequence
from pathlib import Path

from spec_t5x.data.text_files import text_lines
from spec_t5x.errors import InputError

# What tf.strings.strip removes, so that seqio tasks see the same texts. str.strip
# alone would also take no-break spaces away.
_BLANKS = string.whitespace
# Where source and target are, by the number of columns: a text alone, a pair, and a tag, a
# name or the like before the pair.
_USUAL = {1: (0, 0), 2: (0, 1)}
_TAGGED = (1, 2)


def read_pairs(
    path: str | Path,
    source_column: int | None = None,
    target_column: int | None = None,
    num_columns: int | None = None,
) -> Iterator[tuple[str, str]]:
    """The (source, target) of every line, stripped of surrounding spaces.

    Args:
        path: a tab-separated file, gzipped or not, without header or quoting.
        source_column, target_column: from 0. None is the usual one: of two columns the
            first and the second, of more the second and the third, of one the only one.
        num_columns: the number that every line must have; None is that of the first.

    Raises:
        InputError: the file is absent, empty or not UTF-8, a column is outside of
            0..num_columns - 1, or a line has another number of columns.
    """
    if num_columns is None:
        num_columns = next(text_lines(path)).count("\t") + 1
    usual = _USUAL.get(num_columns, _TAGGED)
    source_column = usual[0] if source_column is None else source_column
    target_column = usual[1] if target_column is None else target_column
    return read_columns(path, (source_column, target_column), num_columns)


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
