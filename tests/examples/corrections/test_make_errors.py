"""``make_errors.py``: files of pairs, and what is refused."""

import gzip
import json

import make_errors
import pytest

TEXT = "She has told them about the two children."


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.tsv"
    path.write_text(f"tag\t{TEXT}\ntag\tHe was here.\ntag\t{TEXT}\n", encoding="utf-8")
    return path


def test_the_same_texts_make_the_same_bytes(texts, tmp_path, capsys):
    flags = ["--data", str(texts), "--column", "1", "--num_columns", "2", "--copies", "2"]
    paths = [tmp_path / "new" / name for name in ("one.tsv.gz", "other.tsv.gz")]
    assert [make_errors.main([*flags, "--output", str(path)]) for path in paths] == [0, 0]
    one, other = (path.read_bytes() for path in paths)
    assert one == other
    pairs = [line.split("\t") for line in gzip.decompress(one).decode().splitlines()]
    assert [target for _, target in pairs] == [TEXT, TEXT, "He was here.", "He was here."]
    report, _ = json.JSONDecoder().raw_decode(capsys.readouterr().out)
    right = sum(source == target for source, target in pairs)
    assert (report["pairs"], report["right"]) == (4, right)
    assert make_errors.main([*flags, "--output", str(paths[0])]) == 2
    assert "exists: choose another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "2"], "rate is 2.0: give the share of words with an error, 0 to 1"),
        (["--right", "-1"], "right is -1.0: give the share of texts without errors"),
        (["--copies", "0"], "copies is 0"),
        (["--kinds", "typo"], "kinds are typo: use some of drop"),
        (["--column", "2"], "column 2 of 1"),
    ],
)
def test_mistakes_are_told_in_a_line(texts, tmp_path, capsys, flags, message):
    output = tmp_path / "out.tsv"
    assert make_errors.main(["--data", str(texts), "--output", str(output), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("make_errors: error: ") and message in line
    assert not output.exists()
