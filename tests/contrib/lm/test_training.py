"""``spec-t5x train-lm``: from lines to a language model that decodes speculatively."""

import numpy as np
import pytest

from spec_t5x.checkpoints.loading import check_same_vocabulary, load
from spec_t5x.cli.main import main
from spec_t5x.contrib.lm.gpt import GPTConfig
from spec_t5x.contrib.lm.training_data import TextOptions, _sampled
from spec_t5x.contrib.lm.wordpiece import WordPieceVocabulary
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.training.interfaces import TrainOptions
from spec_t5x.labs.training.run_train import check_kind
from tests.conftest import ENGLISH
from tests.labs.training.conftest import shared_steps  # noqa: F401
from tests.labs.training.toys import assert_identical, run_command, toy_config

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

LINES = [ENGLISH[i] for i in (0, 1, 3, 4, 5, 6, 10, 11)]
STEPS = 4


def train(output, data, *, run="train_lm_target", command="train-lm", **bindings):
    """Runs the command on ``data/train.tsv`` with sizes of a toy."""
    settings = {
        **{"OUTPUT_DIR": str(output), "DATA_DIR": str(data), "TRAIN_STEPS": STEPS},
        **{"TRAIN_FILES": "train.tsv", "DEV_FILES": "dev.tsv"},
        **{"OptimizerOptions.warmup_steps": 1, "OptimizerOptions.cooldown_steps": 0},
        **{"TrainOptions.checkpoint_period": 2, "TrainOptions.eval_period": 0},
        # One shape, one program.
        **{"TextOptions.tokens_per_batch": 128, "TextOptions.buckets": (32,)},
        "TextOptions.max_length": 32,
        **{"GPTConfig.vocab_size": 90, "GPTConfig.emb_dim": 16, "GPTConfig.num_heads": 2},
        **{"GPTConfig.num_layers": 1, "GPTConfig.mlp_dim": 16, "GPTConfig.max_length": 48},
        f"{command.removesuffix('-lm')}.export_dtype": "float32",
    }
    return run_command(command, run, **settings | bindings)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    table = "".join(f"tag\t{line}\tDeutsch\n" for line in LINES * 4)
    (path / "train.tsv").write_text(table)
    (path / "dev.tsv").write_text(f"tag\t{LINES[0]}\tDeutsch\n")
    return path


@pytest.fixture(scope="module")
def target(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "target"
    assert train(output, data) == 0
    return output


def test_the_model_and_its_vocabulary_are_exported(target):
    loaded = load(target / "model")
    assert isinstance(loaded.config, GPTConfig)
    assert isinstance(loaded.vocabulary, WordPieceVocabulary)
    assert loaded.vocabulary.vocab_size == 90
    assert loaded.metadata["step"] == STEPS
    assert loaded.metadata["perplexity"] == pytest.approx(np.exp(loaded.metadata["cross_entropy"]))
    assert loaded.metadata["num_tokens"] == len(loaded.vocabulary.encode(LINES[0])) + 1


@pytest.fixture(scope="module")
def draft(data, target, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "draft"
    bindings = {"CHECKPOINT_PATH": str(target / "model"), "TrainOptions.eval_period": 2}
    bindings |= {"GPTConfig.emb_dim": 8, "GPTConfig.mlp_dim": 8}
    assert train(output, data, run="train_lm_draft", command="distill", **bindings) == 0
    return output


def test_a_draft_learns_from_its_target_and_proposes_for_it(target, draft):
    loaded = load(draft / "draft")
    check_same_vocabulary(load(target / "model"), loaded)
    # alpha on the held-out line, at both temperatures.
    held_out = loaded.metadata["held_out"]
    assert [each["temperature"] for each in held_out] == [0.0, 1.0]
    tokens = len(loaded.vocabulary.encode(LINES[0])) + 1
    assert all(0 <= each["alpha"]["value"] <= 1 == each["alpha"]["num_texts"] for each in held_out)
    assert all(each["alpha"]["count"] == tokens for each in held_out)
    assert not (draft / "vocabulary").exists()
    generator = Generator.load(target / "model", draft / "draft")
    texts = ["", "the cat sleeps", "my"]
    options = GenerateOptions(max_decode_len=8, batch_size=3, gamma=2)
    outputs = list(generator.generate(texts, options))
    plain = list(generator.plain().generate(texts, options))
    for (found,), (expected,) in zip(outputs, plain, strict=True):
        assert found.output_ids == expected.output_ids
        assert 0 < len(found.output_ids) <= 8
    # The prompt is neither returned nor counted.
    assert all(len(group[0].output_ids) == group[0].target_calls for group in plain)


def test_from_nothing_samples_differ_and_do_not_depend_on_the_batch(target, capsys):
    generator = Generator.load(target / "model", "copy")
    options = GenerateOptions(max_decode_len=8, temperature=1.0, num_decodes=4, gamma=2)
    ((*samples,),) = generator.generate([""], options)
    assert len({tuple(sample.output_ids) for sample in samples}) > 1
    assert all(0 not in sample.output_ids for sample in samples)
    common = ["generate", "--target", str(target / "model"), "--max_decode_len", "6"]
    assert main([*common, "--draft", "copy", "--trace", "--temperature", "1", ""]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        ({"TRAIN_FILES": "absent.tsv", "train.initial_checkpoint": "absent"}, "no file"),
        ({"TRAIN_FILES": ()}, "train_files are (): give at least one file"),
        ({"GPTConfig.max_length": 16}, "lines have up to 32 tokens and the model 16 positions"),
        ({"train.initial_checkpoint": "t5-draft"}, "is a T5Config, and the model to train a"),
        ({"train.model": "@T5Config()"}, "nothing uses --gin.GPTConfig.vocab_size: leave it out"),
        ({"TrainOptions.label_smoothing": 0.1}, "leave it 0 for a language model"),
        ({"train.metrics": "@MetricsOptions()"}, "train.metrics cannot score TextOptions"),
    ],
)
def test_a_mistake_is_one_line(data, tmp_path, capsys, bindings, message):
    assert train(tmp_path / "run", data, **bindings) == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if "training a vocabulary" not in line
    ]
    assert line.startswith("spec-t5x: error: ") and message in line


def test_a_vocabularys_lines_are_drawn_uniformly():
    assert _sampled(map(str, range(3)), 5) == ["0", "1", "2"]
    drawn = list(map(int, _sampled(map(str, range(20_000)), 2_000)))
    assert len(set(drawn)) == 2_000
    counts = np.histogram(drawn, bins=10, range=(0, 20_000))[0]
    # Five standard deviations.
    assert np.abs(counts - 200).max() < 67


def test_lines_are_not_the_data_of_a_t5():
    data = TextOptions(train_files="lines.txt")
    with pytest.raises(InputError, match="the data of a T5Config are TextOptions: give DataOpt"):
        check_kind(toy_config(), data, TrainOptions(steps=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["the", "--draft", "medusa"], "draft 'medusa' is for encoder-decoders"),
        (["the", "--draft", "ngram"], "draft 'ngram' is not packaged for "),
        (["the", "--max_decode_len", "49"], "target has 48 positions and --max_decode_len is 49"),
        (
            ["the " * 45, "--max_decode_len", "8"],
            "the prompt has 45 tokens and there is room for 40",
        ),
        (
            ["the", "--draft", "t5-draft", "--max_decode_len", "40"],
            "give a draft of the target's kind",
        ),
    ],
)
def test_a_wrong_command_for_a_language_model_is_one_line(target, capsys, arguments, message):
    command = ["generate", "--target", str(target / "model")]
    draft = [] if "--draft" in arguments else ["--draft", "none"]
    assert main([*command, *draft, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_language_model_is_converted_to_the_own_format_only(target, tmp_path, capsys):
    command = ["convert", str(target / "model"), str(tmp_path / "out"), "--to"]
    assert main([*command, "huggingface"]) == 2
    assert "is a GPT, which huggingface cannot store: give native" in capsys.readouterr().err
    assert main([*command, "native"]) == 0
    copied = load(tmp_path / "out")
    assert_identical(copied.params, load(target / "model").params)
