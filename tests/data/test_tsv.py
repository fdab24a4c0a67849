"""What ``read_pairs`` yields, and what it says of a file that it cannot read."""

import gzip

import pytest

from spec_t5x.data.tsv import read_pairs, text_lines
from spec_t5x.errors import InputError

# More than a reader takes from a disk at once.
MANY = 20_000


@pytest.fixture
def write(tmp_path):
    """``write(content)``: a file that holds these bytes."""

    def write(content, name="pairs.tsv"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_columns_are_stripped_but_no_break_spaces_stay(write, compress):
    path = write(compress(" eins\ttwo \n\u00a0drei\tfour\r\n".encode()))
    assert list(read_pairs(path, 0, 1, 2)) == [("eins", "two"), ("\u00a0drei", "four")]
    assert list(read_pairs(path, 1, 1, 2)) == [("two", "two"), ("four", "four")]


def test_other_characters_that_end_lines_elsewhere_end_none_here(write):
    path = write("a\u2028b\tc\x0bd\n".encode())
    assert list(text_lines(path)) == ["a\u2028b\tc\x0bd"]


def test_a_byte_order_mark_is_no_text(write):
    path = write("\ufeffeins\ttwo\n".encode())
    assert list(read_pairs(path, 0, 1, 2)) == [("eins", "two")]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_line_in_another_encoding_is_named(write, compress):
    good = "f\u00fcnf\tfive\n".encode() * MANY
    path = write(compress(good + "f\u00fcnf\tfive\n".encode("latin-1") + good))
    with pytest.raises(InputError) as raised:
        list(read_pairs(path, 0, 1, 2))
    message = f"{path}, line {MANY + 1}: byte 2 is 0xfc, not UTF-8: "
    assert str(raised.value).startswith(message)


# By name: compressed bytes hold the time, and processes that collect tests must agree on names.
UNREADABLE = {
    "empty": (b"", "is empty: give a file"),
    "empty, compressed": (gzip.compress(b""), "is empty: give a file"),
    "one column": (b"one column\n", "line 1: 1 columns, not 2: separate them by tabs"),
    "three columns": (b"a\tb\na\tb\tc\n", "line 2: 3 columns, not 2"),
    "an empty line": (b"a\tb\n\n", "line 2: 1 columns, not 2"),
    "cut short": (
        gzip.compress(b"a\tb\n" * MANY)[:-9],
        f"after line {MANY}: .*: give a whole file",
    ),
    "damaged": (
        gzip.compress(b"a\tb\n")[:-4] + b"\0\0\0\0",
        "after line .*: give a whole file",
    ),
}


@pytest.mark.parametrize(("content", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_said(write, content, message):
    with pytest.raises(InputError, match=message) as raised:
        list(read_pairs(write(content), 0, 1, 2))
    assert "\n" not in str(raised.value)


def test_an_absent_file(tmp_path):
    with pytest.raises(InputError, match="no file .*nowhere"):
        list(read_pairs(tmp_path / "nowhere.tsv", 0, 1, 2))


@pytest.mark.parametrize("column", [-1, 2])
def test_a_column_that_is_not_there(write, column):
    with pytest.raises(InputError, match=f"column {column} of 2"):
        next(read_pairs(write(b"a\tb\n"), 0, column, 2))
