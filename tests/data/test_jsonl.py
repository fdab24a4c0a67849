"""Pairs in JSON lines."""

import gzip
import json

import pytest

from spec_t5x.data.jsonl import is_jsonl, read_json_pairs
from spec_t5x.errors import InputError

ROWS = [
    {"article": " Ein Text.\u2028Mehr. ", "highlights": "Text", "id": 3},
    {"article": "Noch einer", "highlights": "Einer"},
]


def read(path, source="article", target="highlights"):
    return list(read_json_pairs(path, source, target))


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz"])
def test_pairs_are_read(tmp_path, name):
    path = tmp_path / name
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert is_jsonl(path)
    assert read(path) == [("Ein Text.\u2028Mehr.", "Text"), ("Noch einer", "Einer")]
    assert read(path, "highlights", "article")[1] == ("Einer", "Noch einer")


def test_other_files_are_no_json_lines():
    assert not is_jsonl("pairs.tsv.gz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"article": "x", "highlights": "y"}\n{', "line 2: no JSON"),
        ("[1]", "line 1: .* is no JSON object"),
        ('{"article": "x"}', r"line 1: field 'highlights' is None.*\(article\)"),
        ('{"article": 3, "highlights": "y"}', "field 'article' is 3"),
        (b'{"article": "x", "highlights": "y"}\n"\xdf"', "line 2: byte 2 is 0xdf, not UTF-8"),
        (None, "no file"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, content, message):
    path = tmp_path / "pairs.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        read(path)
