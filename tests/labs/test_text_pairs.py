"""Pairs in tab-separated files and JSON lines, and the errors of a bad file."""

import gzip
import json

import pytest

from spec_t5x.data.text_files import is_jsonl
from spec_t5x.errors import InputError
from spec_t5x.labs.text_pairs import read_json_pairs, read_lines, read_pairs

# More than a reader takes from a disk at once.
MANY = 20_000


@pytest.fixture
def write(tmp_path):
    """Provides ``write(content)``, which returns the path of a file of these bytes."""

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


def test_a_line_in_another_encoding_is_named(write):
    good = "f\u00fcnf\tfive\n".encode() * MANY
    path = write(gzip.compress(good + "f\u00fcnf\tfive\n".encode("latin-1") + good))
    with pytest.raises(InputError) as raised:
        list(read_pairs(path, 0, 1, 2))
    message = f"{path}, line {MANY + 1}: byte 2 is 0xfc, not UTF-8: "
    assert str(raised.value).startswith(message)


# By name: compressed bytes hold the time, and processes that collect tests must agree on names.
UNREADABLE = {
    "empty": (b"", "is empty: give a file"),
    "one column": (b"one column\n", "line 1: 1 columns, not 2: separate them by tabs"),
    "three columns": (b"a\tb\na\tb\tc\n", "line 2: 3 columns, not 2"),
    "cut short": (
        gzip.compress(b"a\tb\n" * MANY)[:-9],
        rf"after line {MANY} \(.*\): give a complete file",
    ),
    "damaged": (
        gzip.compress(b"a\tb\n")[:-4] + b"\0\0\0\0",
        r"after line \d+ \(.*\): give a complete file",
    ),
}


@pytest.mark.parametrize(("content", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_pairs_that_cannot_be_read(write, content, message):
    with pytest.raises(InputError, match=message) as raised:
        list(read_pairs(write(content), 0, 1, 2))
    assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match="num_columns is 0: give at least 1"):
        list(read_pairs(write(content), num_columns=0))


def test_columns_of_several_files_are_read_in_order(write):
    table = write(b"tag\tone\teins\ntag\t \tzwei\ntag\tthree\tdrei\n")
    text = write(gzip.compress(b"four\n\nfive\n"), "text.gz")
    assert list(read_lines([table], (1, 2), 3)) == ["one", "eins", "zwei", "three", "drei"]
    assert list(read_lines([text, text])) == ["four", "five"] * 2
    for files, columns, message in (
        ([], (0,), r"files are \[\], columns \[0\]: give at least one"),
        ([text, table], (0,), "3 columns, not 1"),
        ([text], (1,), "column 1 of 1"),
    ):
        with pytest.raises(InputError, match=message):
            list(read_lines(files, columns))


ROWS = [
    {"article": " Ein Text.\u2028Mehr. ", "highlights": "Text", "id": 3},
    {"article": "Noch einer", "highlights": "Einer"},
]


def read_json(path, source="article", target="highlights"):
    return list(read_json_pairs(path, source, target))


@pytest.mark.parametrize(("name", "compress"), [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)])
def test_json_pairs_are_read(write, name, compress):
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS)
    path = write(compress(text.encode()), name)
    assert is_jsonl(path)
    assert read_json(path) == [("Ein Text.\u2028Mehr.", "Text"), ("Noch einer", "Einer")]
    assert read_json(path, "highlights", "article")[1] == ("Einer", "Noch einer")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n\n", "is empty"),
        ('{"article": "x", "highlights": "y"}\n{', "line 2: not JSON"),
        (
            '{"article": "x"}',
            r"line 1: field 'highlights' is absent: .*\(article\) with target_field",
        ),
        ('{"article": 3, "highlights": "y"}', "field 'article' is 3"),
        ('["x"]', "line 1: .* is not a JSON object"),
    ],
)
def test_json_that_cannot_be_read_is_named(write, content, message):
    with pytest.raises(InputError, match=message):
        read_json(write(content.encode()))
