"""One file of several tasks: every pair with its prefix, and mistakes in one line."""

import gzip
import runpy
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "prefixed_tasks.py"


@pytest.fixture
def mixed(tmp_path):
    """Provides ``mixed(*arguments)``: the status, and the lines of the file."""
    main = runpy.run_path(str(SCRIPT))["main"]
    (tmp_path / "tagged.tsv").write_text("tag\tone\teins\ntag\ttwo\tzwei\n")
    (tmp_path / "pairs.tsv").write_text("a\tb\nc\td\ne\tf\n")
    output = tmp_path / "new" / "train.tsv.gz"

    def run(*arguments):
        tagged = ["--task", "translate: ", str(tmp_path / "tagged.tsv"), "2"]
        pairs = ["--task", "sum: ", str(tmp_path / "pairs.tsv"), "1"]
        status = main([*tagged, *pairs, "--output", str(output), *arguments])
        if status:
            return status, []
        return status, gzip.decompress(output.read_bytes()).decode().splitlines()

    return run


def test_every_pair_has_its_prefix_and_is_written_as_often_as_wanted(mixed):
    status, lines = mixed()
    assert status == 0
    twice = {"translate: one\teins": 2, "translate: two\tzwei": 2}
    assert Counter(lines) == Counter(twice | {"sum: a\tb": 1, "sum: c\td": 1, "sum: e\tf": 1})


def test_equal_seeds_make_equal_files_and_others_another_order(mixed):
    lines = mixed()[1]
    assert mixed()[1] == lines
    assert any(mixed("--seed", str(seed))[1] != lines for seed in range(1, 5))


def test_pairs_without_a_source_are_left_out(mixed, tmp_path):
    with (tmp_path / "pairs.tsv").open("a") as file:
        file.write("\tnothing\n")
    assert len(mixed()[1]) == 7


def test_the_first_pairs_of_each_task(mixed):
    assert len(mixed("--first", "1")[1]) == 3


@pytest.mark.parametrize("first", ["0", "-1"])
def test_a_wrong_number_of_first_pairs_is_named(mixed, capsys, first):
    assert mixed("--first", first) == (2, [])
    assert f"first is {first}: give at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("times", ["0", "x"])
def test_a_wrong_number_of_times_is_named(mixed, tmp_path, capsys, times):
    assert mixed("--task", "c: ", str(tmp_path / "pairs.tsv"), times) == (2, [])
    assert f"pairs.tsv is {times!r}: give a number from 1" in capsys.readouterr().err
