"""``spec-t5x convert`` and ``--vocabulary``: from the command line to text."""

import json
from typing import NamedTuple

import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.cli.main import main

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXTS = ("The cat sleeps under the table.", "He drinks two cups of coffee.", "It is raining.")


class Result(NamedTuple):
    """What a command did."""

    status: int
    output: str
    errors: list[str]


@pytest.fixture
def spec_t5x(capsys):
    """``spec_t5x(*arguments)``: the command line."""

    def run(*arguments) -> Result:
        try:
            status = main(list(map(str, arguments)))
        except SystemExit as exit_:
            status = exit_.code
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err.splitlines())

    return run


def test_text_is_the_same_from_every_format(spec_t5x, tiny_pair, tmp_path):
    formats = {"t5x": "checkpoint_0", "huggingface": "theirs", "native": "ours"}
    for model in ("target", "draft"):
        for to, name in formats.items():
            result = spec_t5x("convert", tiny_pair / model, tmp_path / model / name, "--to", to)
            assert result.status == 0 and not result.errors
            printed = json.loads(result.output)
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
            assert "holds no vocabulary" in spec_t5x("generate", *flags, *TEXTS).errors[0]
            flags += ["--vocabulary", f"{vocabulary}:0"]
        result = spec_t5x("generate", *flags, "--max_decode_len", 24, *TEXTS)
        assert result.status == 0, result.errors
        outputs.add(result.output)
    assert len(outputs) == 1 and outputs.pop().strip()


def test_types_and_overwriting(spec_t5x, tiny_pair, tmp_path):
    arguments = ("convert", tiny_pair / "draft", tmp_path / "checkpoint_0", "--to", "t5x")
    assert spec_t5x(*arguments, "--dtype", "bfloat16").status == 0
    (error,) = spec_t5x(*arguments).errors
    assert "exists: choose another directory" in error
    assert spec_t5x(*arguments, "--overwrite").status == 0
    assert load(tmp_path / "checkpoint_0").vocabulary.vocab_size == 120


def test_mistakes_are_one_line(spec_t5x, tiny_pair, tmp_path):
    for arguments, expected in (
        ((tiny_pair / "draft", tmp_path / "a", "--to", "onnx"), "there is no 'onnx': choose from"),
        ((tiny_pair / "absent", tmp_path / "a", "--to", "native"), "no directory"),
        ((tiny_pair / "draft", tmp_path / "a", "--to", "t5x"), "checkpoint_STEP"),
        ((tiny_pair / "draft", "/dev/null/a", "--to", "native"), "/dev/null"),
    ):
        result = spec_t5x("convert", *arguments)
        assert result.status == 2
        (error,) = result.errors
        assert expected in error
    assert not (tmp_path / "a").exists()


def test_gin_gives_the_vocabulary(spec_t5x, tiny_pair):
    target = tiny_pair / "target"
    arguments = ("generate", "--target", target, "--draft", "none", "--max_decode_len", 4, *TEXTS)
    (error,) = spec_t5x(*arguments, "--gin.Models.vocabulary='bytes:0'").errors
    assert "holds a vocabulary of its own" in error


def test_one_tensor_of_float32_keeps_all_in_float32(spec_t5x, tiny_pair, tmp_path):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from safetensors.torch import load_file, save_file

    source = tmp_path / "mixed"
    flags = ("--to", "huggingface", "--dtype", "bfloat16")
    assert spec_t5x("convert", tiny_pair / "target", source, *flags).status == 0
    assert load(source).params["encoder"]["encoder_norm"]["scale"].shape == (32,)
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    name = "encoder.final_layer_norm.weight"
    exact = torch.linspace(0.1, 0.2, 32)
    save_file({**tensors, name: exact}, file, metadata={"format": "pt"})
    assert spec_t5x("convert", source, tmp_path / "ours", "--to", "native").status == 0
    found = load(tmp_path / "ours")
    assert found.metadata["stored_dtype"] == "float32"
    np.testing.assert_array_equal(found.params["encoder"]["encoder_norm"]["scale"], exact.numpy())
