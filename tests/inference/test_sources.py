"""Lines to inputs: what each says, what is wrong with it, how shards are read."""

import gzip
import itertools
import json

import pytest

from spec_t5x.data.text_files import is_jsonl
from spec_t5x.errors import InputError
from spec_t5x.inference.sources import digest, file_source, read_shards, survey


def items(path, content: bytes, **options):
    path.write_bytes(content)
    source = file_source(str(path), **options)
    return [source.item(index, raw) for index, raw in enumerate(source.raw())]


def test_lines_of_text_keep_their_places(tmp_path):
    content = b"\xef\xbb\xbffirst\r\nsecond\xe2\x80\xa8half\n\n \t\nlast"
    found = items(tmp_path / "in.txt", content)
    assert [item.index for item in found] == [0, 1, 2, 3, 4]
    assert [item.text for item in found] == ["first", "second\u2028half", "", "", "last"]
    assert [item.place for item in found][4] == ("line", 5)
    assert [bool(item.error) for item in found] == [False, False, True, True, False]
    assert "empty" in found[2].error
    assert found[0].fields == {"inputs_pretokenized": "first"}


def test_bytes_that_are_no_text_are_named_with_their_column(tmp_path):
    (first, second) = items(tmp_path / "in.txt", b"ab\xffc\nfine\n")
    assert "byte 3 is 0xff, not UTF-8" in first.error
    assert second.text == "fine"


def test_a_json_line_gives_its_text_and_passes_on_its_fields(tmp_path):
    for name in ("inputs", "input", "text"):
        line = json.dumps({"id": 7, name: "Hallo", "targets": "Hello"}).encode()
        (item,) = items(tmp_path / "in.jsonl", line)
        assert item.text == "Hallo"
        assert item.fields == {"inputs_pretokenized": "Hallo", "id": 7, "targets": "Hello"}


def test_a_field_can_be_named_and_makes_the_file_json(tmp_path, caplog):
    line = b'{"article": "long", "text": "other"}\n'
    (item,) = items(tmp_path / "in.data", line, field="article")
    assert (item.text, item.fields["text"]) == ("long", "other")
    (item,) = items(tmp_path / "in.data", line)
    assert item.text == line.decode().rstrip()
    assert "in.data has JSON objects, which are decoded as text: --field NAME" in caplog.text


def test_a_name_of_json_lines_in_any_case(tmp_path):
    for name in ("in.JSONL", "in.jsonlines", "in.Json.GZ"):
        assert is_jsonl(name)


def test_inputs_that_are_all_errors_are_refused_before_a_model_is_loaded(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"txt": "a"}\n' * 5)
    source = file_source(str(path))
    with pytest.raises(InputError, match="in.jsonl can be used; line 1: no field 'inputs'"):
        survey(source, 2)
    path.write_bytes(b'{"txt": "a"}\n' * 5 + b'{"text": "a"}\n')
    assert survey(source, 2)[0] == 6


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON ("),
        (b'{"inputs": "a", "b": %s}' % (b"[" * 100 + b"]" * 100), "over 100 levels deep: fix"),
        (b'{"source": "x"}', "no field 'inputs' or 'input' or 'text' (there are ['source'])"),
        (b'{"text": 5}', "field 'text' is 5, not a text"),
        (b'{"text": "x", "score": NaN}', "NaN is not a finite number"),
        (b'{"text": "x", "score": -1e999}', "-1e999 is not a finite number"),
    ],
)
def test_bad_json_is_one_line_and_no_more(tmp_path, line, reason):
    bad, good = items(tmp_path / "in.jsonl", line + b'\n{"text": "good"}\n')
    assert reason in bad.error
    assert "\n" not in bad.error and len(bad.error) < 250
    assert good.text == "good"


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_in_utf16_is_refused_as_a_whole(tmp_path, encoding, compress):
    """All lines after the first would be texts with null characters."""
    content = compress("\ufeffone\r\ntwo\r\n".encode(encoding))
    with pytest.raises(InputError, match="in.txt is UTF-16 or UTF-32: convert it"):
        items(tmp_path / "in.txt", content)


def test_a_file_of_nothing_and_no_file_are_errors(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"")
    with pytest.raises(InputError, match="holds no inputs"):
        survey(file_source(str(tmp_path / "in.txt")), 4)
    with pytest.raises(InputError, match="no file .*absent.txt"):
        file_source(str(tmp_path / "absent.txt"))
    with pytest.raises(InputError, match="~no-one/in.txt names no home directory"):
        file_source("~no-one/in.txt")
    with pytest.raises(InputError, match="is a folder: give a file"):
        file_source(str(tmp_path))
    # A text in place of a path: the system refuses to look for it, as it does in others' folders.
    with pytest.raises(InputError, match="a long text .*give"):
        file_source("a long text " * 50)


def test_shards_are_read_one_by_one_and_the_rest_is_passed_by(tmp_path):
    path = tmp_path / "in.txt"
    lines = [b"%d\n" % n for n in range(10)]
    path.write_bytes(b"".join(lines))
    source = file_source(str(path))
    count, digests = survey(source, 3)
    assert count == 10
    shards = [lines[n : n + 3] for n in range(0, 10, 3)]
    assert digests == [digest(shard) for shard in shards]
    for wanted in itertools.chain.from_iterable(
        itertools.combinations(range(4), n) for n in range(5)
    ):
        assert list(read_shards(source, 3, wanted)) == [(n, shards[n]) for n in wanted]
