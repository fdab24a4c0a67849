"""The documented way from two columns of text to a draft: its commands, at toy size."""

import itertools
import json
import random
import re
import shlex
from pathlib import Path

import gin
import pytest

from spec_t5x.cli.main import main

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

TRAINING = Path(__file__).parents[2] / "docs" / "training.md"
HEADING = "## Your own data, end to end"
NUMBERS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "f\u00fcnf"}

# What makes it a matter of seconds; all else is as documented.
_SHORT = {
    "MAX_SOURCE_LENGTH": 16,
    "MAX_TARGET_LENGTH": 16,
    "DataOptions.buckets": "(16,)",
    "DataOptions.tokens_per_batch": 256,
    "OptimizerOptions.warmup_steps": 5,
    "OptimizerOptions.cooldown_steps": 5,
}
TOY = {
    "train": {
        **_SHORT,
        "T5Config.vocab_size": 28,
        "T5Config.emb_dim": 16,
        "T5Config.num_heads": 2,
        "T5Config.head_dim": 8,
        "T5Config.mlp_dim": 32,
        "T5Config.num_encoder_layers": 1,
        "T5Config.num_decoder_layers": 2,
        "T5Config.dropout_rate": 0.0,
        "TRAIN_STEPS": 40,
    },
    "distill": {
        **_SHORT,
        "DECODER_LAYERS": "'every:2'",
        "DistillOptions.eval_temperatures": "(1.0,)",
        "TRAIN_STEPS": 20,
        "TrainOptions.eval_period": 10,
    },
}


def commands():
    """Returns the ``spec-t5x`` commands of the section, as lists of arguments."""
    text = TRAINING.read_text(encoding="utf-8")
    (block,) = re.findall(rf"{HEADING}\n.*?```bash\n(.*?)```", text, re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    return [arguments[1:] for arguments in lines if arguments]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Provides ``run(arguments)``: the command at toy size, in a folder with the two files."""
    pairs = [
        (" ".join(words), " ".join(NUMBERS[word] for word in words))
        for length in (1, 2, 3, 4)
        for words in itertools.product(NUMBERS, repeat=length)
    ]
    random.Random(0).shuffle(pairs)
    (tmp_path / "data").mkdir()
    for name, some in {"train": pairs[40:], "dev": pairs[:40]}.items():
        text = "".join(f"{source}\t{target}\n" for source, target in some)
        (tmp_path / "data" / f"{name}.tsv").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run(arguments):
        gin.clear_config()
        toy = [f"--gin.{name}={value}" for name, value in TOY.get(arguments[0], {}).items()]
        assert main([*arguments, *toy]) == 0

    return run


def test_from_two_columns_to_a_draft(run, capfd):
    train, distill, generate, evaluate = commands()
    run(train)
    assert "training a vocabulary of 28 pieces" in capfd.readouterr().err
    run(distill)
    alphas = [
        float(found) for found in re.findall(r"T=1: .* alpha (0\.\d+)", capfd.readouterr().err)
    ]
    assert max(alphas) > alphas[0]
    run([*generate, "--max_decode_len", "16"])
    assert re.search(r"outputs\s*\W\s*identical", capfd.readouterr().out)
    # One source is longer than those of the training.
    run([*evaluate, "--truncate", "--max_decode_len", "16", "--batch_size", "8"])
    figures = json.loads(capfd.readouterr().out)
    assert figures["num_pairs"] == 40
    assert {"bleu", "alpha", "block_efficiency"} <= figures.keys()
