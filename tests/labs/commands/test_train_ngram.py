"""``spec-t5x train-ngram``: from text to a draft, and what it refuses."""

import errno
import gzip
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.native.ngram_tables import load_ngram
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.training import exports
from tests.cli.results import Result, assert_refused

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

LINES = ["Wir gehen in den Garten.", "Wir gehen in den Wald.", "Der Film beginnt.", ""]


@pytest.fixture
def count(run, tiny_pair, tmp_path):
    """Provides ``count(*files, **flags)``: the command, for the tiny target."""

    def run_command(*files, **flags) -> Result:
        usual = {"vocabulary": tiny_pair / "target", "output": tmp_path / "ngrams", "min_count": 1}
        arguments = []
        for name, value in (usual | flags).items():
            arguments += [f"--{name}"] if value is True else [f"--{name}", value]
        return run("train-ngram", "--data", *files, *arguments)

    return run_command


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return path


def test_counts_text_and_drafts_for_the_target(count, text_file, tiny_pair, tmp_path):
    result = count(text_file, order=3)
    assert result.errors == []
    assert result.status == 0
    report = json.loads("\n".join(result.lines))
    target = load(tiny_pair / "target")
    ids = [target.vocabulary.encode(line) for line in LINES[:3]]
    assert report["counted"]["texts"] == 3
    assert report["counted"]["tokens"] == sum(map(len, ids)) + 3
    assert report["output"] == str(tmp_path / "ngrams")

    draft = load_ngram(tmp_path / "ngrams", target)
    assert (draft.order, draft.vocab_size) == (3, target.config.vocab_size)
    # Only one text begins like this.
    assert np.argmax(draft.next_probs(jnp.array(ids[2][:2]))) == ids[2][2]
    generator = Generator.load(tiny_pair / "target", tmp_path / "ngrams")
    options = GenerateOptions(gamma=2, max_decode_len=10)
    expected, found = (
        next(each.generate(["Der Zug"], options)) for each in (generator.plain(), generator)
    )
    assert found[0].output_ids == expected[0].output_ids
    assert found[0].proposed > 0


def test_a_column_of_several_files(count, tmp_path, text_file, tiny_pair):
    first, second = tmp_path / "first.tsv.gz", tmp_path / "second.tsv"
    first.write_bytes(gzip.compress("".join(f"a\t{line}\n" for line in LINES[:2]).encode()))
    second.write_text("".join(f"b\t{line}\n" for line in LINES[2:]), encoding="utf-8")
    assert count(first, second, column=1, num_columns=2, output=tmp_path / "columns").status == 0
    # A vocabulary by its file, too.
    spiece = tiny_pair / "target" / "spiece.model"
    assert count(text_file, vocabulary=spiece, output=tmp_path / "lines").status == 0
    for name in ("config.json", "ngrams.safetensors"):
        assert (tmp_path / "columns" / name).read_bytes() == (
            tmp_path / "lines" / name
        ).read_bytes()


def test_a_full_disk_is_one_line(count, text_file, tmp_path, monkeypatch):
    def fail(path, arrays):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(exports, "save_arrays", fail)
    message = f"cannot write {tmp_path / 'ngrams'} (No space left on device): make room there"
    assert_refused(count(text_file), message)
    assert [each.name for each in tmp_path.iterdir()] == [text_file.name]


def test_overwrites_only_when_told(count, text_file, tmp_path):
    assert count(text_file, order=2).status == 0
    message = "ngrams exists: choose another directory or give --overwrite"
    assert_refused(count(text_file, order=1), message)
    assert load_ngram(tmp_path / "ngrams").order == 2
    assert count(text_file, order=1, overwrite=True).status == 0
    assert load_ngram(tmp_path / "ngrams").order == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"min_count": 100}, "no 2 tokens occur together 100 times"),
        ({"column": 1}, "column 1 of 1: give 0 to 0"),
        ({"num_columns": 2}, "line 1: 1 columns, not 2"),
        ({"vocabulary": "no-such-model"}, "no vocabulary at no-such-model"),
    ],
)
def test_mistakes_are_one_line(count, text_file, tmp_path, flags, message):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    assert_refused(count(empty), "holds no text: give the column of the texts")
    assert_refused(count(text_file, **flags), message)
    assert not (tmp_path / "ngrams").exists()
