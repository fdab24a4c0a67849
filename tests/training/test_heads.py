"""Training of draft heads: what they learn, resumption, the command line."""

import json
import random

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.own.target_drafts import load_heads
from spec_t5x.cli.main import main
from spec_t5x.data.batching import Batches, tokenise_file
from spec_t5x.models.heads import HeadsConfig, T5Heads
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.testing.toy_models import tiny_t5
from spec_t5x.training.learners import HeadsLearner, heads_losses
from spec_t5x.training.optimizers import make_optimizer, make_schedule
from spec_t5x.training.trainer import TrainOptions, fit

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

SUBJECTS = ["the cat", "my sister", "the train", "nobody", "the doctor"]
VERBS = ["sleeps", "works", "reads", "leaves", "sings"]
PLACES = ["in the garden", "at the station", "under the table", "in the kitchen"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs of made-up sentences: a source and the same in another order."""
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(0)
    for name, number in (("train.tsv", 200), ("dev.tsv", 30)):
        lines = []
        for _ in range(number):
            subject, verb, place = (rng.choice(words) for words in (SUBJECTS, VERBS, PLACES))
            lines.append(f"{subject} {verb} {place}\t{place} {verb} {subject}\n")
        (folder / name).write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def target(tiny_pair):
    return load(tiny_pair / "target")


def make_batches(data, name, target):
    pairs = tokenise_file(
        data / name,
        target.vocabulary,
        source_column=0,
        target_column=1,
        num_columns=2,
        max_source_length=32,
        max_target_length=32,
        cache_dir=None,
    )
    return Batches(pairs, tokens_per_batch=256, seed=0, buckets=(32,))


def train(data, target, directory, steps, num_heads=2, **options):
    schedule = make_schedule(peak=1e-2, steps=40, warmup_steps=3)
    defaults = {"log_period": 5, "eval_period": 0, "checkpoint_period": 4}
    defaults |= {"distillation_weight": 1.0}
    config = HeadsConfig(target.config.emb_dim, target.config.vocab_size, num_heads, 24)
    options = TrainOptions(steps=steps, **defaults | options)
    return fit(
        HeadsLearner(config, options, T5Model.create(target.params, target.config)),
        make_optimizer("adamw", schedule),
        schedule,
        make_batches(data, "train.tsv", target),
        make_batches(data, "dev.tsv", target),
        directory,
    )


def test_each_head_learns_the_token_that_is_one_place_further_than_the_last_heads():
    """The sums over heads, rows and positions, one by one."""
    model, rng = tiny_t5(0), np.random.default_rng(0)
    params = {
        "wi": jnp.asarray(rng.normal(size=(3, 32, 12), scale=0.3), jnp.float32),
        "wo": jnp.asarray(rng.normal(size=(3, 12, 16), scale=0.3), jnp.float32),
    }
    heads, weights = T5Heads.create(params, model), (0.0, 0.25, 1.0)
    text = np.array([[7, 8, 9, 4, 1], [3, 1, 0, 0, 0]])
    inputs = (
        jnp.array([[5, 6, 1], [9, 1, 0]]),
        jnp.array([[0, 7, 8, 9, 4], [0, 3, 1, 0, 0]]),
        jnp.asarray(text),
    )

    @jax.jit
    def compute():
        def read(network):
            states = network.decode_states(network.encode(inputs[0]), *inputs)
            return states, network.logits(states)

        states, logits = model.module.apply({"params": model.params}, method=read)
        # Every head at every place, each on its own.
        of_heads = heads.head_logits(states.reshape(10, 16), inputs[2].reshape(10), 3)
        sums = [heads_losses(heads, model, inputs, distillation_weight=w) for w in weights]
        return jax.nn.log_softmax(of_heads), jax.nn.log_softmax(logits), sums

    of_heads, of_target, sums = compute()
    of_heads = np.asarray(of_heads, np.float64).reshape(2, 5, 3, 30)
    of_target = np.asarray(of_target, np.float64)
    of_text = divergence = correct = tokens = 0.0
    for row, length in enumerate([5, 2]):
        for place in range(length):
            for i in range(3):
                ahead = place + 1 + i
                if ahead >= length:
                    continue
                ours, theirs = of_heads[row, place, i], of_target[row, ahead]
                of_text -= ours[text[row, ahead]]
                divergence += np.sum(np.exp(theirs) * (theirs - ours))
                correct += np.argmax(ours) == text[row, ahead]
                tokens += 1
    assert tokens == (4 + 3 + 2) + 1
    for weight, found in zip(weights, sums, strict=True):
        expected = (1 - weight) * of_text + weight * divergence
        np.testing.assert_allclose(found.loss, expected, rtol=1e-3)
        np.testing.assert_allclose(found.cross_entropy, of_text, rtol=1e-3)
        assert (found.num_correct, found.num_tokens) == (correct, tokens)


def test_texts_shorter_than_the_heads_reach_count_for_nothing():
    model = tiny_t5(0)
    config = HeadsConfig(emb_dim=16, vocab_size=30, num_heads=4, hidden_dim=8)
    params = HeadsLearner(config, TrainOptions(steps=1), model).init(jax.random.key(0))
    heads = T5Heads.create(params, model)
    inputs = (jnp.array([[5, 1]]), jnp.array([[0, 7]]), jnp.array([[7, 1]]))
    assert jax.jit(heads_losses)(heads, model, inputs).num_tokens == 1


def test_loss_goes_down(data, target, tmp_path):
    result = train(data, target, tmp_path, 40, eval_period=20)
    assert result.finished and int(result.state.step) == 40
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.6 * losses[0]
    # Of the text, which the target and so the heads know nothing of.
    assert np.isfinite(result.dev[0].cross_entropy) and result.dev[0].num_tokens > 0


GIN = """
train_heads.output_dir = %OUTPUT_DIR
train_heads.target = %TARGET
train_heads.num_heads = 2
train_heads.hidden_dim = 24
train_heads.data = @DataOptions()
train_heads.optimizer = @OptimizerOptions()
train_heads.options = @TrainOptions()
train_heads.export_dtype = "float32"
DataOptions.directory = %DATA_DIR
DataOptions.train_file = "train.tsv"
DataOptions.dev_file = "dev.tsv"
DataOptions.buckets = (32, 96)
DataOptions.tokens_per_batch = 256
OptimizerOptions.warmup_steps = 1
TrainOptions.steps = 2
TrainOptions.distillation_weight = 1.0
"""


@pytest.fixture
def arguments(data, tiny_pair, tmp_path):
    gin_file = tmp_path / "heads.gin"
    gin_file.write_text(GIN)
    yield [
        "train-heads",
        f"--gin_file={gin_file}",
        f"--gin.DATA_DIR='{data}'",
        f"--gin.OUTPUT_DIR='{tmp_path / 'output'}'",
        f"--gin.TARGET='{tiny_pair / 'target'}'",
    ]
    gin.clear_config()


def test_command_line(arguments, target, tmp_path, capfd):
    assert main(arguments) == 0
    loaded = load_heads(tmp_path / "output" / "heads", target)
    assert (loaded.config.num_heads, loaded.metadata["step"]) == (2, 2)
    assert "finished at step 2; heads in " in capfd.readouterr().err
    # Run again, for a step more: it goes on.
    gin.clear_config()
    assert main([*arguments, "--gin.TrainOptions.steps=3"]) == 0
    assert "resumed at step 2" in capfd.readouterr().err
    later = load_heads(tmp_path / "output" / "heads", target)
    assert later.metadata["step"] == 3
    assert np.any(later.params["wo"] != loaded.params["wo"])


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("--gin.DataOptions.vocabulary='spiece.model'", "DataOptions.vocabulary is 'spiece.model'"),
        ("--gin.TARGET='nowhere'", "no directory nowhere"),
        ("--gin.train_heads.num_heads=0", "HeadsConfig.num_heads is 0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_mistakes_on_the_command_line(arguments, binding, message, capfd):
    assert main([*arguments, binding]) == 2
    error = capfd.readouterr().err
    assert error.startswith("spec-t5x: error: ") and message in error
    assert error.count("\n") == 1
