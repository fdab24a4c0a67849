"""Cards of the packaged models: what is measured, written and checked."""

import argparse
import json
import re
import shlex
import shutil
from pathlib import Path

import gin
import pytest

from spec_t5x.checkpoints.loading import PACKAGED_MODELS, load
from spec_t5x.checkpoints.make_draft import PACKAGED_DRAFTS
from spec_t5x.cli import evaluate as evaluate_command
from spec_t5x.cli.gin_files import parse_gin, read_all
from spec_t5x.cli.main import _parser
from spec_t5x.errors import InputError
from spec_t5x.experiments.packaging import __main__ as packaging
from spec_t5x.experiments.packaging import cards
from spec_t5x.experiments.packaging.cards import CARDS, Measurement
from spec_t5x.training import run_distill, run_train  # noqa: F401, gin knows what is imported

REPOSITORY = Path(__file__).parents[3]

PRINTED = {
    "bleu": 31.04,
    "bleu_signature": "nrefs:1",
    "num_pairs": 8,
    "num_skipped": 2,
    "alpha": 0.7061,
    "block_efficiency": 2.618,
    "acceptance_by_position": [0.65, 0.449, 0.3, 0.2],
    "intervals": {"bleu": [30.0, 32.0], "alpha": [0.7, 0.72]},
}


@pytest.fixture
def models(tmp_path):
    """A folder with the packaged files that a card is made of."""
    copies = tmp_path / "copies"
    for name in ("ende-target", "ende-draft", "ende-ngram"):
        (copies / name).mkdir(parents=True)
        for file in (PACKAGED_MODELS / name).iterdir():
            if file.name not in ("README.md", packaging.FIGURES_NAME):
                (copies / name / file.name).symlink_to(file)
    return copies


def test_every_packaged_model_has_a_card_that_was_measured():
    drafts = {name for kinds in PACKAGED_DRAFTS.values() for name in kinds.values()}
    assert set(CARDS) == {*PACKAGED_DRAFTS, *drafts}
    for name in CARDS:
        figures = json.loads((PACKAGED_MODELS / name / packaging.FIGURES_NAME).read_text())
        text = (PACKAGED_MODELS / name / "README.md").read_text(encoding="utf-8")
        assert text == cards.rendered(name, PACKAGED_MODELS / name, figures)


@pytest.mark.parametrize("name", CARDS)
def test_its_commands_are_commands(name):
    parser = argparse.ArgumentParser()
    evaluate_command.add_arguments(parser)
    for measurement in CARDS[name].measurements:
        args = parser.parse_args(shlex.split(measurement.arguments))
        assert args.target in PACKAGED_DRAFTS
        assert args.temperature in (0.0, 1.0)
    assert len({each.name for each in CARDS[name].measurements}) == len(CARDS[name].measurements)


def test_cards_are_written_from_what_the_commands_print(models, tmp_path):
    ran = []

    def run(measurement, folder):
        ran.append((measurement.arguments, folder))
        return PRINTED

    names = ["ende-target", "ende-draft", "ende-ngram"]
    assert packaging.measure(names, tmp_path / "data", models, packaging.remembered(run)) == 0
    # The target and its draft share what they are both measured on.
    assert len(ran) == len(set(ran)) == 3 + 1 + 6
    assert {folder for _, folder in ran} == {tmp_path / "data" / "ende"}

    target, draft, ngram = ((models / name / "README.md").read_text() for name in names)
    assert target.startswith("# ende-target: English to German\n")
    assert "15.6M parameters in bfloat16" in target
    row = "| dev, temperature 0 | 8 (2 left out as too long) | BLEU 31.0 (30.0\u201332.0) |"
    assert row in target
    assert "BLEU: `nrefs:1`." in target
    # No interval was found of the length.
    row = "| dev, temperature 1 | 8 (2 left out as too long) | 0.706 (0.700\u20130.720) | 2.62 |"
    assert row in draft
    assert "| unigram, dev, temperature 0 | 8 (" in ngram
    assert "383,194 texts" in ngram
    for text in (target, draft, ngram):
        assert "spec-t5x evaluate --target ende-target" in text


def test_a_check_finds_what_is_outside(models, tmp_path, capsys):
    names = ["ende-draft"]
    packaging.measure(names, tmp_path, models, lambda *_: PRINTED)
    assert packaging.check(names, tmp_path, models, lambda *_: PRINTED) == 0
    assert "0 figures outside" in capsys.readouterr().out
    other = PRINTED | {"alpha": 0.7201}
    assert packaging.check(names, tmp_path, models, lambda *_: other) == 1
    said = capsys.readouterr().out
    assert "alpha | 0.706 (0.700\u20130.720) | 0.720 | OUTSIDE |" in said
    assert "bleu | 31.040 (30.000\u201332.000) | 31.040 | within |" in said
    assert "3 figures outside" in said


def test_a_command_is_run_in_its_folder(tmp_path):
    (tmp_path / "few.tsv").write_text("Where is the station?\tWo ist der Bahnhof?\n" * 2)
    arguments = "--target ende-target --draft copy --gamma 2 --data few.tsv --max_decode_len 8"
    found = packaging.evaluate(Measurement(name="x", label="x", arguments=arguments), tmp_path)
    assert found["num_pairs"] == 2
    assert set(found["intervals"]) == {"bleu", "alpha", "block_efficiency"}
    wrong = Measurement(name="x", label="x", arguments=f"{arguments} --num_columns 3")
    with pytest.raises(InputError, match="--num_columns 3 ended with 2"):
        packaging.evaluate(wrong, tmp_path)


def test_an_export_is_taken_over(tiny_pair, tmp_path):
    packaging.save("ende-target", tiny_pair / "target", tmp_path, steps=7)
    ours, theirs = (load(folder) for folder in (tmp_path / "ende-target", tiny_pair / "target"))
    assert ours.config == theirs.config
    assert ours.metadata["stored_dtype"] == "bfloat16"
    assert (ours.metadata["training_steps"], ours.metadata["max_source_length"]) == (7, 96)
    packaging.save("ende-ngram", PACKAGED_MODELS / "ende-ngram", tmp_path)
    for file in ("config.json", "ngrams.safetensors"):
        copied = (tmp_path / "ende-ngram" / file).read_bytes()
        assert copied == (PACKAGED_MODELS / "ende-ngram" / file).read_bytes()


def test_what_was_trained_in_parts_has_the_steps_of_all(tmp_path):
    """Of heads as well, which are copied as they are."""
    export = tmp_path / "heads"
    shutil.copytree(PACKAGED_MODELS / "ende-heads", export)
    config = json.loads((export / "config.json").read_text())
    config["step"] = config.pop("training_steps")
    (export / "config.json").write_text(json.dumps(config))
    for steps, expected in ((None, config["step"]), (9, 9)):
        packaging.save("ende-heads", export, tmp_path / "models", steps=steps)
        saved = json.loads((tmp_path / "models" / "ende-heads" / "config.json").read_text())
        assert saved["training_steps"] == expected and "step" not in saved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("measure --data data ende-draft fren-target", "no packaged model 'fren-target'"),
        ("check --data nowhere ende-draft", "no folder nowhere/ende: give --data"),
        ("save ende-target nowhere", "no file nowhere/config.json"),
        ("save ende-target data/foreign", "data/foreign has the format None: give what a"),
        (f"save ende-ngram {PACKAGED_MODELS / 'ende-ngram'}", "is the packaged ende-ngram itself"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, arguments, message, capsys):
    (tmp_path / "data" / "ende").mkdir(parents=True)
    (tmp_path / "data" / "foreign").mkdir()
    (tmp_path / "data" / "foreign" / "config.json").write_text('{"model_type": "t5"}')
    monkeypatch.chdir(tmp_path)
    assert packaging.main(arguments.split()) == 2
    assert message in capsys.readouterr().err
    assert (PACKAGED_MODELS / "ende-ngram" / "config.json").exists()


@pytest.mark.parametrize("name", CARDS)
def test_its_trainings_are_commands(name, monkeypatch):
    """Of which gin takes what they bind."""
    monkeypatch.chdir(REPOSITORY)
    for command in CARDS[name].training.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(command)
        assert program == "spec-t5x"
        flags = [word for word in words if word.startswith("--gin.")]
        args, rest = _parser().parse_known_args([word for word in words if word not in flags])
        assert not rest
        if not flags:
            continue
        gin.clear_config()
        parse_gin(args.gin_file, flags)
        used = {name for _, text in read_all(args.gin_file) for name in re.findall(r"%(\w+)", text)}
        macros = {flag.removeprefix("--gin.").split("=")[0] for flag in flags}
        assert {macro for macro in macros if "." not in macro} <= used
    gin.clear_config()
