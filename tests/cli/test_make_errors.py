"""``spec-t5x make-errors``: files of pairs, and what is refused."""

import gzip
import json

import pytest

from tests.cli.results import assert_refused

TEXT = "She has told them about the two children."


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.tsv"
    path.write_text(f"tag\t{TEXT}\ntag\tHe was here.\ntag\t{TEXT}\n", encoding="utf-8")
    return path


def test_the_same_texts_make_the_same_bytes(run, texts, tmp_path):
    flags = ["--data", texts, "--column", 1, "--num_columns", 2, "--copies", 2, "--output"]
    paths = [tmp_path / "new" / name for name in ("one.tsv.gz", "other.tsv.gz")]
    results = [run("make-errors", *flags, path) for path in paths]
    assert [result.status for result in results] == [0, 0]
    one, other = (path.read_bytes() for path in paths)
    assert one == other
    pairs = [line.split("\t") for line in gzip.decompress(one).decode().splitlines()]
    assert [target for _, target in pairs] == [TEXT, TEXT, "He was here.", "He was here."]
    report = json.loads("\n".join(results[0].lines))
    right = sum(source == target for source, target in pairs)
    assert (report["pairs"], report["right"]) == (4, right)
    assert_refused(run("make-errors", *flags, paths[0]), "exists: choose another file")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "2"], "--rate is 2.0: give the share of words with an error, 0 to 1"),
        (["--right", "-1"], "--right is -1.0: give the share of texts without errors"),
        (["--copies", "0"], "--copies is 0"),
        (["--kinds", "typo"], "kinds are typo: use some of drop"),
        (["--column", "2"], "column 2 of 1"),
    ],
)
def test_mistakes_are_told_in_a_line(run, texts, tmp_path, flags, message):
    command = ["make-errors", "--data", texts, "--output", tmp_path / "out.tsv", *flags]
    assert_refused(run(*command), message)
    assert not (tmp_path / "out.tsv").exists()
