"""Tab-separated files, gzipped or not."""

import gzip
import io
import string
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


def open_text(path: str | Path) -> io.TextIOBase:
    """Opens a UTF-8 file for reading, decompressing it if it is gzip.

    Raises:
        InputError: there is no such file.
    """
    path = Path(path)
    # newline="\n": texts may hold other characters that look like line ends.
    if is_gzip(path):
        return gzip.open(path, "rt", encoding="utf-8", newline="\n")
    return path.open(encoding="utf-8", newline="\n")


def read_pairs(
    path: str | Path, source_column: int, target_column: int, num_columns: int
) -> Iterator[tuple[str, str]]:
    """Yields (source, target) of every line, stripped of surrounding spaces.

    Args:
        path: a tab-separated file, gzipped or not, without header or quoting.
        source_column, target_column: from 0.
        num_columns: the number that every line must have.

    Raises:
        InputError: the file is absent, empty or not UTF-8, a column is outside of
            0..num_columns - 1, or a line has another number of columns.
    """
    for column in (source_column, target_column):
        if not 0 <= column < num_columns:
            raise InputError(f"column {column} of {num_columns}: give one of 0..{num_columns - 1}")
    line_number = 0
    try:
        with open_text(path) as lines:
            for line_number, line in enumerate(lines, start=1):
                columns = line.rstrip("\r\n").split("\t")
                if len(columns) != num_columns:
                    raise InputError(
                        f"{path}, line {line_number}: {len(columns)} columns, not "
                        f"{num_columns}: mend the line or set num_columns"
                    )
                source, target = columns[source_column], columns[target_column]
                yield source.strip(_BLANKS), target.strip(_BLANKS)
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}, after line {line_number}: {error}: give a whole UTF-8 file"
        ) from error
    if not line_number:
        raise InputError(f"{path} is empty: give a file with at least one line")
