"""``spec-t5x train`` as its gin files say: a first training, and what it refuses."""

import random
import re
import sys
from collections.abc import Sequence

import gin
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.data.vocabulary import SentencePieceVocabulary
from spec_t5x.errors import InputError
from spec_t5x.generation import Generator
from spec_t5x.labs.training import run_train
from spec_t5x.labs.training.gin_arguments import built_arguments
from spec_t5x.labs.training.run_data import DataOptions
from spec_t5x.labs.training.same_run import held_run
from spec_t5x.labs.training.sentencepiece_training import train_sentencepiece
from tests.labs.training.toys import a_minute_a_step, assert_identical, run_command

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}
TOY = {
    "TRAIN_STEPS": 3,
    "OptimizerOptions.warmup_steps": 1,
    "OptimizerOptions.cooldown_steps": 0,
    "T5Config.vocab_size": 26,
    "T5Config.emb_dim": 8,
    "T5Config.mlp_dim": 16,
    "T5Config.num_encoder_layers": 1,
    "T5Config.num_decoder_layers": 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(0)
    for name, number in (("train.tsv", 60), ("dev.tsv", 10)):
        texts = [rng.choices(list(WORDS), k=rng.randint(1, 3)) for _ in range(number)]
        lines = (" ".join(t) + "\t" + " ".join(WORDS[word] for word in t) for t in texts)
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def train(data, tmp_path):
    """Provides ``train(**macros)``, which runs the command and returns its exit status."""
    given = {"DATA_DIR": str(data), "OUTPUT_DIR": str(tmp_path / "output"), **TOY}
    return lambda **macros: run_command("train", "first_training", **given | macros)


def test_a_directory_in_use_is_left_as_it_is(train, tmp_path, capfd):
    output = tmp_path / "output"
    # Another process, too, would have its own open file.
    with held_run(output, {"model": "that of the other run"}):
        before = {path: path.read_bytes() for path in output.iterdir()}
        assert train() == 2
        assert before == {path: path.read_bytes() for path in output.iterdir()}
    assert f"{output} is in use by process" in capfd.readouterr().err


def test_a_first_training_is_resumed_and_started_from(train, tmp_path, capfd):
    output = tmp_path / "output"
    # Out of time: a separate status, for a script that runs it again.
    with a_minute_a_step():
        assert train(TrainOptions__max_minutes=2.5) == 75
    assert "out of time at step 2" in capfd.readouterr().err
    assert load(output / "model").metadata["step"] == 2
    assert train() == 0
    assert "resumed at step 2" in capfd.readouterr().err
    loaded = load(output / "model")
    assert (loaded.config.emb_dim, loaded.metadata["step"]) == (8, 3)
    # Sources may be as long as those of the training.
    assert Generator.of(loaded).max_source_len == 64
    vocabulary = SentencePieceVocabulary(output / "vocabulary" / "spiece.model")
    assert loaded.vocabulary.fingerprint() == vocabulary.fingerprint()

    assert train(DataOptions__train_file="dev.tsv") == 2
    assert "was trained on other texts, or for another vocab_size" in capfd.readouterr().err
    assert train(T5Config__relpos_max_distance=64) == 2
    assert "are of a run with another model: give the earlier one" in capfd.readouterr().err

    # A model that starts from this one, with its vocabulary and no other.
    started = tmp_path / "started"
    from_it = {"OUTPUT_DIR": str(started), "train__initial_checkpoint": str(output / "model")}
    assert train(**from_it, TrainOptions__max_minutes=1e-9) == 75
    found = load(started / "model")
    assert found.vocabulary.fingerprint() == vocabulary.fingerprint()
    assert_identical(found.params, loaded.params)
    another = train_sentencepiece(WORDS, tmp_path / "another", 16)
    for change, message in (
        ({"DataOptions__vocabulary": f"{another}:0"}, "already holds a vocabulary"),
        ({"T5Config__mlp_dim": 24}, "make T5Config.mlp_dim 16"),
        ({"T5Config__mlp_dim": 24, "train__grow": True}, "make T5Config.mlp_dim a multiple of 16"),
        ({"train__grow": True, "train__initial_checkpoint": None}, "has no model to grow: give"),
        ({"train__initial_checkpoint": None}, "a run with another initial checkpoint: give"),
    ):
        assert train(**from_it | change) == 2
        assert message in capfd.readouterr().err


def test_a_vocabulary_is_trained_again_before_the_first_checkpoint(data, tmp_path):
    options = DataOptions(directory=str(data), train_file="train.tsv")
    kept = [options.own_vocabulary(tmp_path, size) for size in (26, 26, 25)]
    assert [each.vocab_size for each in kept] == [26, 26, 25]


def test_a_training_grows_a_smaller_model(train, tmp_path, capfd):
    assert train(TrainOptions__eval_period=3) == 0
    before = re.findall(r"dev loss ([\d.]+)", capfd.readouterr().err)[-1]
    small = tmp_path / "output" / "model"
    large = {"OUTPUT_DIR": str(tmp_path / "large"), "train__initial_checkpoint": str(small)}
    large |= {"T5Config__mlp_dim": 32, "T5Config__num_decoder_layers": 2, "train__grow": True}
    # A rate at which a step changes nothing.
    assert train(**large, OptimizerOptions__learning_rate=1e-12, TrainOptions__eval_period=3) == 0
    after = re.findall(r"dev loss ([\d.]+)", capfd.readouterr().err)[-1]
    assert float(after) == pytest.approx(float(before), abs=5e-3)
    assert load(tmp_path / "large" / "model").config.mlp_dim == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train__initial_checkpoint": "absent"}, "/train.tsv: give the path of a text file"),
        ({"train__export_dtype": "bf16"}, "stored dtype is 'bf16': choose one of bfloat16,"),
        ({"OptimizerOptions__warmup_steps": 4}, "4 warm-up"),
        ({"TrainOptions__seed": -1}, "seed is -1: give at least 0"),
        ({"TrainOptions__objective": "kl"}, "objective is 'kl': choose one of cross_entropy, forw"),
        ({"OptimizerOptions__step": 3}, "step"),
        ({"TrainOptions__objective": "jeffreys"}, "objective is 'jeffreys' and only drafts learn"),
        ({"TrainOptions__distillation_weight": 1.0}, "distillation_weight is 1.0 and only drafts"),
        (
            {"TrainOptions__label_smoothing": 0.1, "T5Config__added_rows": 1},
            "label_smoothing is 0.1: leave it 0 for a language model, and for a model with added",
        ),
        ({"DataOptions__metric": "rouge"}, "metric is 'rouge' and train.metrics is None, which"),
        (
            {"TaskDataOptions__tokens_per_batch": 9},
            "nothing uses --gin.TaskDataOptions.tokens_per_batch: leave it out, or bind @TaskData",
        ),
        ({"x/TrainOptions__steps": 2}, "nothing uses --gin.x/TrainOptions.steps: leave it out"),
        ({"x/train__grow": True}, "nothing uses --gin.x/train.grow: leave it out"),
        ({"MetricsOptions__period": 2}, "nothing uses --gin.MetricsOptions.period: leave it out"),
        # Texts in gin, which would be true, or are no objects.
        ({"train__model": "T5Config"}, "train.model is 'T5Config': give a value of type Network"),
        ({"train__grow": "false"}, "train.grow is 'false': give a value of type bool (an object"),
        ({"TrainOptions__tensorboard": "false"}, "tensorboard is 'false': give a value of type"),
        ({"DataOptions__packed": "no"}, "packed is 'no': give a value of type bool"),
        ({"DataOptions__buckets": 16}, "buckets is 16: give a value of type tuple"),
        ({"OptimizerOptions__clip_norm": "1"}, "clip_norm is '1': give a value of type float"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_mistakes_are_found_before_any_data_is_read(train, tmp_path, change, message, capfd):
    assert train(DATA_DIR=str(tmp_path), **change) == 2
    error = capfd.readouterr().err
    assert error.startswith("spec-t5x: error: ") and message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("absent", "change", "message"),
    [
        ("clu", {"TrainOptions__tensorboard": True}, "TensorBoard's curves: clu"),
        ("sacrebleu", {"train__metrics": "@MetricsOptions()"}, "BLEU: sacrebleu"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_an_option_needs_is_missed_before_any_data_is_read(
    train, tmp_path, monkeypatch, absent, change, message, capfd
):
    # Another test may have imported parts of it.
    for name in [absent, *(name for name in sys.modules if name.startswith(f"{absent}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert train(DATA_DIR=str(tmp_path), **change) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line and " is not installed: pip install 'spec_t5x[" in line
    assert not (tmp_path / "output").exists()


def test_an_output_that_is_no_checkpoint_is_left_alone(train, tmp_path, capfd):
    (tmp_path / "output" / "model").mkdir(parents=True)
    (tmp_path / "output" / "model" / "thesis.tex").touch()
    assert train() == 2
    assert "so it is no checkpoint to overwrite" in capfd.readouterr().err


def test_a_training_of_another_package_may_annotate_its_arguments_or_not():
    def tune(rate: float, how, steps: "int" = 1, names: Sequence[str] = (), **others):
        """Trains nothing."""

    bound = {"rate": 1, "how": "fast", "steps": 2, "names": ("a",), "other": "text"}
    with gin.unlock_config():
        made = gin.configurable(tune, module="own_trainings")
        for name, value in bound.items():
            gin.bind_parameter(f"own_trainings.tune.{name}", value)
        assert built_arguments(made, []) == bound
        gin.bind_parameter("own_trainings.tune.rate", "1")
        with pytest.raises(InputError, match="tune.rate is '1': give a value of type float"):
            built_arguments(made, [])


def test_a_files_binding_in_a_scope_is_used_or_refused():
    """One without a scope may be of a class that an including file replaces."""
    with gin.unlock_config():
        gin.parse_config("TrainOptions.steps = 2\nseed = 3\nx/OptimizerOptions.clip_norm = 1.0")
        with pytest.raises(InputError, match="nothing uses x/spec_t5x.OptimizerOptions.clip_norm"):
            built_arguments(run_train.train, [])
        gin.parse_config("train.optimizer = @x/OptimizerOptions()")
        (optimizer,) = built_arguments(run_train.train, []).values()
    assert optimizer.clip_norm == 1


def test_a_flag_of_a_tasks_function_may_be_used_later():
    """Preprocessors are called as data are read, after the check."""

    def noise(density=0.1):
        return density

    with gin.unlock_config():
        gin.external_configurable(noise, module="own")
        flags = ["--gin.own.noise.density=0.3"]
        assert built_arguments(run_train.train, flags) == {}
