"""``spec-t5x convert`` and ``--vocabulary``: from the command line to text."""

import dataclasses
import json

import pytest

from spec_t5x import registry
from spec_t5x.checkpoints.formats import Format, writers_of
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.native.model_files import open_model, write_model
from spec_t5x.models.binding import Family
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config
from tests.cli.results import assert_refused

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

# A format that only writes, as a folder of ``contrib`` may register it.
OURS = Format(
    recognizes=lambda directory, values: False,
    open_model=open_model,
    writers={"ours": write_model},
)
TEXTS = ("The cat sleeps under the table.", "He drinks two cups of coffee.", "It is raining.")


def test_text_is_the_same_from_every_format(run, tiny_pair, tmp_path):
    formats = {"t5x": "checkpoint_0", "huggingface": "theirs", "native": "ours"}
    for model in ("target", "draft"):
        for to, name in formats.items():
            result = run("convert", tiny_pair / model, tmp_path / model / name, "--to", to)
            assert result.status == 0 and not result.errors
            printed = json.loads("\n".join(result.lines))
            assert printed["format"] == to and printed["model"]["vocab_size"] == 128
    # As T5X would have left them.
    for model in ("target", "draft"):
        for name in ("spec_t5x.json", "spiece.model"):
            (tmp_path / model / "checkpoint_0" / name).unlink()
    vocabulary = tiny_pair / "target" / "spiece.model"
    outputs = set()
    for name in formats.values():
        flags = ["--target", tmp_path / "target" / name, "--draft", tmp_path / "draft" / name]
        if name == "checkpoint_0":
            assert "holds no vocabulary" in run("generate", *flags, *TEXTS).errors[0]
            flags += ["--vocabulary", f"{vocabulary}:0"]
        result = run("generate", *flags, "--max_decode_len", 24, *TEXTS)
        assert result.status == 0, result.errors
        outputs.add(tuple(result.lines))
    assert len(outputs) == 1 and any(outputs.pop())


def test_types_and_overwriting(run, tiny_pair, tmp_path):
    arguments = ("convert", tiny_pair / "draft", tmp_path / "checkpoint_0", "--to", "t5x")
    assert run(*arguments, "--dtype", "bfloat16").status == 0
    (error,) = run(*arguments).errors
    assert "exists: choose another directory" in error
    assert run(*arguments, "--overwrite").status == 0
    assert load(tmp_path / "checkpoint_0").vocabulary.vocab_size == 120


def test_a_format_of_contrib(run, tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setitem(registry._PLACES["format"], "ours", "tests.cli.test_convert:OURS")
    result = run("convert", tiny_pair / "draft", tmp_path / "a", "--to", "ours")
    assert result.status == 0, result.errors
    assert load(tmp_path / "a").config == load(tiny_pair / "draft").config


@dataclasses.dataclass(frozen=True)
class WiderConfig(T5Config):
    """A configuration of another family than T5's, whose networks have more than T5's."""


WIDER = Family(config=WiderConfig, model=T5Model)


def test_a_family_that_extends_t5_is_not_written_as_t5(monkeypatch):
    before = writers_of(WiderConfig())
    assert before.keys() == writers_of(T5Config()).keys() > {"huggingface", "t5x"}
    monkeypatch.setitem(registry._PLACES["family"], "wider", "tests.cli.test_convert:WIDER")
    assert writers_of(WiderConfig()).keys() == {"native"}


@pytest.mark.parametrize(
    ("source", "destination", "to", "expected"),
    [
        ("draft", "a", "onnx", "--to is 'onnx': choose one of t5x, t5x_scanned, huggingface"),
        ("absent", "a", "onnx", "--to is 'onnx'"),
        ("absent", "a", "native", "no directory"),
        ("draft", "a", "t5x", "checkpoint_STEP"),
        ("draft", "/dev/null/a", "native", "/dev/null"),
    ],
)
def test_mistakes_are_one_line(run, tiny_pair, tmp_path, source, destination, to, expected):
    arguments = (tiny_pair / source, tmp_path / destination, "--to", to)
    assert_refused(run("convert", *arguments), expected)
    assert not (tmp_path / "a").exists()
