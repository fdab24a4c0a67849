"""Losses, schedules, optimizers, and the training loop from file to exported model."""

import dataclasses
import io
import json
import random

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.cli.main import main
from spec_t5x.data.batching import Batches, tokenise_file
from spec_t5x.data.vocabulary import SentencePieceVocabulary, train_sentencepiece
from spec_t5x.errors import InputError
from spec_t5x.training.distillation_losses import DIVERGENCES
from spec_t5x.training.learners import Network
from spec_t5x.training.losses import cross_entropy, mean_loss, token_losses
from spec_t5x.training.optimizers import make_optimizer, make_schedule
from spec_t5x.training.progress import ProgressReporter
from spec_t5x.training.trainer import TrainOptions, fit, init_state, make_train_step, model_inputs
from tests.training.toys import toy_config

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}
CONFIG = toy_config(32, 16, dropout_rate=0.1)


def write_pairs(path, number, seed):
    rng = random.Random(seed)
    lines = []
    for _ in range(number):
        words = rng.choices(list(WORDS), k=rng.randint(1, 3))
        lines.append(" ".join(words) + "\t" + " ".join(WORDS[w] for w in words))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    lines = write_pairs(folder / "train.tsv", 300, seed=0)
    write_pairs(folder / "dev.tsv", 40, seed=1)
    train_sentencepiece(lines, folder / "spiece", 30, character_coverage=1.0)
    return folder


def make_batches(data, name, seed=0, tokens_per_batch=192):
    pairs = tokenise_file(
        data / name,
        SentencePieceVocabulary(data / "spiece.model"),
        source_column=0,
        target_column=1,
        num_columns=2,
        max_source_length=24,
        max_target_length=24,
        cache_dir=None,
    )
    return Batches(pairs, tokens_per_batch=tokens_per_batch, seed=seed, buckets=(24,))


def train(
    data,
    directory,
    steps,
    *,
    config=CONFIG,
    optimizer="adamw",
    batches=None,
    **options,
):
    # One schedule, whatever the number of steps.
    schedule = make_schedule(peak=1e-2, steps=40, warmup_steps=3)
    defaults = {"log_period": 5, "eval_period": 0, "checkpoint_period": 4}
    return fit(
        Network(config, TrainOptions(steps=steps, **defaults | options)),
        make_optimizer(optimizer, schedule),
        schedule,
        batches or make_batches(data, "train.tsv"),
        make_batches(data, "dev.tsv"),
        directory,
    )


def assert_identical(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# The loop.


def test_loss_goes_down_and_is_recorded(data, tmp_path, capfd):
    result = train(data, tmp_path, 40, eval_period=20)
    assert result.finished and int(result.state.step) == 40
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.6 * losses[0]
    dev = [line["dev_loss"] for line in lines if "dev_loss" in line]
    assert len(dev) == 2 and dev[1] < dev[0]
    assert result.dev[0].cross_entropy == pytest.approx(dev[1])
    assert "step 40/40  loss" in capfd.readouterr().err


def test_a_run_out_of_time_goes_on_later(data, tmp_path):
    stopped = train(data, tmp_path / "run", 6, max_minutes=1e-9)
    assert not stopped.finished and int(stopped.state.step) == 0
    resumed = train(data, tmp_path / "run", 6)
    assert_identical(resumed.state, train(data, tmp_path / "other", 6).state)


def test_a_finished_run_is_left_as_it_is(data, tmp_path):
    first = train(data, tmp_path, 3)
    again = train(data, tmp_path, 3)
    assert_identical(first.state, again.state)
    assert again.dev == first.dev


@pytest.mark.parametrize("change", [{"seed": 1}, {"tokens_per_batch": 96}, {"name": "dev.tsv"}])
def test_what_it_goes_on_with_is_what_it_began_with(data, tmp_path, change):
    train(data, tmp_path, 2)
    assert train(data, tmp_path, 3).finished
    with pytest.raises(InputError, match="step 3 is of other pairs, another seed or batches of"):
        train(data, tmp_path, 4, batches=make_batches(data, **{"name": "train.tsv", **change}))


def test_old_checkpoints_go(data, tmp_path):
    train(data, tmp_path, 9, checkpoint_period=2, keep_checkpoints=2)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["8", "9"]


@pytest.mark.parametrize(
    "change",
    [{"optimizer": "adafactor"}, {"config": dataclasses.replace(CONFIG, mlp_dim=40)}],
)
def test_a_checkpoint_of_another_kind(data, tmp_path, change):
    train(data, tmp_path, 1)
    with pytest.raises(InputError, match="another model or optimizer"):
        train(data, tmp_path, 2, **change)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_in_bfloat16_only_the_network_computes(data, optimizer):
    """Parameters, the optimizer's averages and the loss stay in float32."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    transformation = make_optimizer(optimizer, lambda step: 1e-2)
    learner = Network(config, TrainOptions(steps=1))
    state, step = init_state(learner, transformation), make_train_step(learner, transformation)
    inputs = model_inputs(next(make_batches(data, "train.tsv").batches()))
    lowered = step.lower(state, inputs, jax.random.key(0), None)
    # What is multiplied is in bfloat16.
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert products and sum("bf16" in line for line in products) > len(products) / 2
    state, sums = step(state, inputs, jax.random.key(0), None)
    types = {leaf.dtype for leaf in jax.tree.leaves((state.params, sums))}
    assert types == {jnp.dtype(jnp.float32)}
    averages = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert averages and all(leaf.dtype == jnp.float32 for leaf in averages)
    exact = Network(CONFIG, TrainOptions(steps=1))
    exact_step = make_train_step(exact, transformation)
    _, expected = exact_step(init_state(exact, transformation), inputs, jax.random.key(0), None)
    assert float(sums.loss) == pytest.approx(float(expected.loss), rel=2e-2)


# The loss.


def random_logits(seed=0, shape=(2, 3, 7)):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


TARGETS = jnp.array([[3, 1, 0], [6, 2, 1]])


def reference_loss(logits, label_smoothing, z_loss):
    log_probs = jax.nn.log_softmax(logits)
    labels = jax.nn.one_hot(TARGETS, logits.shape[-1])
    labels = (1 - label_smoothing) * labels + label_smoothing / logits.shape[-1]
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return -jnp.sum(labels * log_probs, axis=-1) + z_loss * log_z**2


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy_and_its_gradient(label_smoothing, z_loss):
    logits, weights = random_logits(), random_logits(1, (2, 3))
    ours, plain = cross_entropy(logits, TARGETS, label_smoothing, z_loss)
    expected = reference_loss(logits, label_smoothing, z_loss)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(plain, reference_loss(logits, 0.0, 0.0), rtol=1e-5)

    def ours_of(x):
        return (cross_entropy(x, TARGETS, label_smoothing, z_loss)[0] * weights).sum()

    def expected_of(x):
        return (reference_loss(x, label_smoothing, z_loss) * weights).sum()

    gradients = jax.grad(ours_of)(logits), jax.grad(expected_of)(logits)
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_padding_does_not_count():
    logits = random_logits()
    sums = token_losses(logits, TARGETS)
    assert sums.num_tokens == 5
    changed = logits.at[0, 2].set(100.0)
    assert_identical(sums, token_losses(changed, TARGETS))
    # Also where it has no chance.
    never = token_losses(logits.at[0, 2, 0].set(-jnp.inf), TARGETS)
    assert_identical(sums, never)
    empty = token_losses(logits, jnp.zeros_like(TARGETS))
    assert mean_loss(empty) == 0.0


def test_accuracy():
    logits = 5.0 * jax.nn.one_hot(TARGETS, 7).at[0, 0].set(0.0).at[0, 0, 5].set(1.0)
    assert token_losses(logits, TARGETS).num_correct == 4


@pytest.mark.parametrize("objective", DIVERGENCES)
def test_distillation_mixes(objective):
    student, teacher = random_logits(0), random_logits(1)
    weights = (TARGETS > 0).astype(jnp.float32)
    sums = token_losses(
        student,
        TARGETS,
        target_logits=teacher,
        distillation_weight=0.25,
        objective=objective,
    )
    expected = 0.75 * cross_entropy(student, TARGETS)[0]
    expected += 0.25 * DIVERGENCES[objective](teacher, student)
    np.testing.assert_allclose(sums.loss, (expected * weights).sum(), rtol=1e-5)


def test_cross_entropy_needs_no_teacher():
    student, teacher = random_logits(0), random_logits(1)
    taught = token_losses(
        student,
        TARGETS,
        target_logits=teacher,
        distillation_weight=1.0,
        objective="cross_entropy",
    )
    assert_identical(taught, token_losses(student, TARGETS))
    assert not TrainOptions(steps=1, objective="cross_entropy").uses_target
    with pytest.raises(InputError, match="objective is 'kl': choose one of cross_entropy, forw"):
        TrainOptions(steps=1, objective="kl")


# Schedules and optimizers.


def test_schedule_values():
    schedule = make_schedule(peak=0.8, steps=20, warmup_steps=4, cooldown_steps=5)
    values = [float(schedule(step)) for step in range(20)]
    expected = [0.2, 0.4, 0.6, *[0.8] * 13, 0.64, 0.48, 0.32, 0.16]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    schedule = make_schedule(peak=1.0, steps=1000, warmup_steps=25, decay="rsqrt")
    values = [float(schedule(step)) for step in (0, 24, 25, 100, 400)]
    np.testing.assert_allclose(values, [0.04, 1.0, 1.0, 0.5, 0.25], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay": "cosine"}, "cosine"),
        ({"peak": 0.0}, "peak"),
        ({"warmup_steps": 8, "cooldown_steps": 3}, "do not fit into 10 steps"),
    ],
)
def test_impossible_schedules(changes, message):
    with pytest.raises(InputError, match=message):
        make_schedule(**{"peak": 1.0, "steps": 10} | changes)


# Progress, BLEU and the command line.


def test_a_terminal_gets_a_bar(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    reporter = ProgressReporter(tmp_path, start_step=0, steps=2, stream=stream)
    with reporter:
        reporter.count(1, tokens=10, pairs=2)
        reporter.report(1, loss=1.5, accuracy=0.5, rate=1e-3)
        reporter.say("a line")
    assert "loss 1.5000" in stream.getvalue() and "a line" in stream.getvalue()


GIN = """
train.output_dir = %OUTPUT_DIR
train.model = @T5Config()
train.data = @DataOptions()
train.optimizer = @OptimizerOptions()
train.options = @TrainOptions()
train.export_dtype = "float32"
DataOptions.train_file = "train.tsv"
DataOptions.dev_file = "dev.tsv"
DataOptions.directory = %DATA_DIR  # a comment with a %MACRO
DataOptions.buckets = (24, 96)
DataOptions.tokens_per_batch = 192
OptimizerOptions.warmup_steps = 1
TrainOptions.steps = 2
"""


@pytest.fixture
def gin_file(tmp_path):
    sizes = dataclasses.asdict(CONFIG) | {"vocab_size": 26}
    bindings = [f"T5Config.{name} = {value!r}" for name, value in sizes.items()]
    path = tmp_path / "tiny.gin"
    path.write_text(GIN + "\n".join(bindings) + "\n")
    yield path
    gin.clear_config()


def test_command_line(data, gin_file, tmp_path, capfd):
    output = tmp_path / "output"
    arguments = [
        f"--gin_file={gin_file}",
        f"--gin.DATA_DIR='{data}'",
        f"--gin.OUTPUT_DIR='{output}'",
    ]
    assert main(["train", *arguments]) == 0
    loaded = load(output / "model")
    assert loaded.config.emb_dim == CONFIG.emb_dim
    vocabulary = SentencePieceVocabulary(output / "vocabulary" / "spiece.model")
    assert loaded.vocabulary.fingerprint() == vocabulary.fingerprint()

    # Out of time: a status of its own, for a script that runs it again.
    gin.clear_config()
    hurried = ["--gin.TrainOptions.steps=3", "--gin.TrainOptions.max_minutes=1e-9"]
    assert main(["train", *arguments, *hurried]) == 75
    assert "out of time at step 2" in capfd.readouterr().err

    # Resumed for a step; then a model that starts from this one, with its vocabulary.
    gin.clear_config()
    assert main(["train", *arguments, "--gin.TrainOptions.steps=3"]) == 0
    assert (output / "checkpoints" / "3").is_dir()
    gin.clear_config()
    started = [
        *arguments[:2],
        f"--gin.OUTPUT_DIR='{tmp_path / 'started'}'",
        f"--gin.train.initial_checkpoint='{output / 'model'}'",
    ]
    assert main(["train", *started]) == 0
    model = load(tmp_path / "started" / "model")
    assert model.vocabulary.fingerprint() == vocabulary.fingerprint()
    gin.clear_config()
    another = train_sentencepiece(WORDS, tmp_path / "another", 16)
    other = f"--gin.DataOptions.vocabulary='{another}:0'"
    assert main(["train", *started, other]) == 2
    assert "holds a vocabulary of its own" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.export_dtype='bf16'", "stored dtype is 'bf16': choose bfloat16 or float32"),
        ("OptimizerOptions.warmup_steps=3", "3 warm-up"),
        ("OptimizerOptions.name='sgd'", "'sgd'"),
        ("TrainOptions.data_parallel=99", "data_parallel 99 times model_parallel 1 are 99 devices"),
        ("TrainOptions.prng_impl='rgb'", "prng_impl is 'rgb': choose one of rbg"),
        ("TrainOptions.seed=-1", "seed is -1: give 0 or more"),
    ],
)
def test_what_would_end_it_later_is_said_first(gin_file, tmp_path, setting, message, capfd):
    """Before a vocabulary is trained, or a file read: there is none."""
    places = [f"--gin.DATA_DIR='{tmp_path}'", f"--gin.OUTPUT_DIR='{tmp_path / 'output'}'"]
    assert main(["train", f"--gin_file={gin_file}", *places, f"--gin.{setting}"]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "output").exists()


def test_an_output_that_is_no_checkpoint_is_left_alone(gin_file, tmp_path, capfd):
    (tmp_path / "output" / "model").mkdir(parents=True)
    (tmp_path / "output" / "model" / "thesis.tex").touch()
    places = [f"--gin.DATA_DIR='{tmp_path}'", f"--gin.OUTPUT_DIR='{tmp_path / 'output'}'"]
    assert main(["train", f"--gin_file={gin_file}", *places]) == 2
    assert "so it is no checkpoint to overwrite" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs the macro OUTPUT_DIR: add --gin.OUTPUT_DIR=VALUE"),
        (["--steps=3"], "unknown argument '--steps=3'"),
        (["--gin.TrainOptions.step=3"], "step"),
        (["--gin.OUTPUT_DIR='x"], "gin:"),
    ],
)
def test_mistakes_on_the_command_line(gin_file, arguments, message, capfd):
    assert main(["train", f"--gin_file={gin_file}", *arguments]) == 2
    error = capfd.readouterr().err
    assert error.startswith("spec-t5x: error: ") and message in error
    assert error.count("\n") == 1
