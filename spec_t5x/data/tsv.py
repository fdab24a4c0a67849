"""Tab-separated files, gzipped or not."""

import codecs
import gzip
import string
import zlib
from collections.abc import Iterator
from pathlib import Path

from spec_t5x.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"
# What tf.strings.strip removes, so that seqio tasks see the same texts. str.strip
# alone would also take no-break spaces away.
_BLANKS = string.whitespace


def is_gzip(path: str | Path) -> bool:
    """Whether the file is gzip, by its content.

    Raises:
        InputError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no file {path}: give a tab-separated file (.tsv or .tsv.gz)")
    with path.open("rb") as stream:
        return stream.read(2) == _GZIP_MAGIC


def text_lines(path: str | Path) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, without their ends, decompressed if it is gzip.

    A byte order mark, which some editors put first, is no part of a line.

    Raises:
        InputError: there is no such file, it is empty, it is cut short, or a line is not
            UTF-8.
    """
    path, number = Path(path), 0
    try:
        with gzip.open(path) if is_gzip(path) else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield _decoded(line, path, number)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}, after line {number}: {error}: give a whole file") from error
    if not number:
        raise InputError(f"{path} is empty: give a file with at least one line")


def _decoded(line: bytes, path: Path, number: int) -> str:
    """One line, decoded by itself: a reader of blocks could not say which one it was."""
    try:
        return line.removeprefix(codecs.BOM_UTF8).decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number}: byte {error.start + 1} is 0x{line[error.start]:02x}, not "
            "UTF-8: convert the file (iconv -t utf-8), or mend the line"
        ) from error


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
    """Yields (source, target) of every line, stripped of surrounding spaces.

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
    for column in (source_column, target_column):
        if not 0 <= column < num_columns:
            raise InputError(f"column {column} of {num_columns}: give one of 0..{num_columns - 1}")
    for number, line in enumerate(text_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != num_columns:
            raise InputError(
                f"{path}, line {number}: {len(columns)} columns, not {num_columns}: separate "
                "them by tabs, or set num_columns"
            )
        source, target = columns[source_column], columns[target_column]
        yield source.strip(_BLANKS), target.strip(_BLANKS)
