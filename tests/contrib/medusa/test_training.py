"""Tests of the training of draft heads: their losses, resumption, the command line."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.contrib.medusa.checkpoints import load_heads
from spec_t5x.contrib.medusa.network import HeadsConfig, T5Heads
from spec_t5x.contrib.medusa.training import HeadsLearner, heads_losses, train_heads
from spec_t5x.errors import InputError
from spec_t5x.labs.training.interfaces import TrainOptions
from spec_t5x.labs.training.optimizers import OptimizerOptions
from spec_t5x.labs.training.run_data import DataOptions
from spec_t5x.labs.training.trainer import fit
from spec_t5x.models.partitioning import make_mesh
from spec_t5x.models.seq2seq import T5Model
from tests.conftest import ENGLISH, GERMAN
from tests.labs.training.conftest import shared_steps  # noqa: F401
from tests.labs.training.toys import copy_batches, toy_config
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


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
        # Every head at every place, one by one.
        of_heads = heads.head_logits(states.reshape(10, 16), inputs[2].reshape(10), 3)
        sums = [heads_losses(heads, model, inputs, distillation_weight=w) for w in weights]
        return jax.nn.log_softmax(of_heads), jax.nn.log_softmax(logits), sums

    of_heads, of_target, sums = compute()
    of_heads = np.asarray(of_heads, np.float64).reshape(2, 5, 3, 30)
    of_target = np.asarray(of_target, np.float64)
    of_text = divergence = correct = tokens = 0.0
    for row, place, i in np.ndindex(2, 5, 3):
        ahead = place + 1 + i
        if ahead < (5, 2)[row]:
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


def test_loss_goes_down(tmp_path):
    model, rate = tiny_t5(0), 1e-2
    config = HeadsConfig(emb_dim=16, vocab_size=30, num_heads=2, hidden_dim=24)
    options = TrainOptions(steps=40, log_period=5, eval_period=0, distillation_weight=1.0)
    learner, batches = HeadsLearner(config, options, model), copy_batches(30, rows=8)
    result = fit(learner, optax.adam(rate), lambda step: rate, batches, batches, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    assert np.isfinite(result.dev[0].cross_entropy)


@pytest.fixture
def run(tiny_pair, tmp_path):
    """Provides ``run(steps)``, the function that the command calls."""
    pairs = zip(ENGLISH, GERMAN, strict=True)
    lines = [f"{source[:20]}\t{target[:20]}\n" for source, target in pairs]
    (tmp_path / "train.tsv").write_text("".join(lines), encoding="utf-8")

    def run(steps, vocabulary=None, packed=False, **options):
        data = {"directory": str(tmp_path), "train_file": "train.tsv", "buckets": (32, 96)}
        data["packed"] = packed
        train_heads(
            output_dir=str(tmp_path),
            target=str(tiny_pair / "target"),
            data=DataOptions(**data, vocabulary=vocabulary, tokens_per_batch=256),
            optimizer=OptimizerOptions(warmup_steps=1),
            options=TrainOptions(steps=steps, **options),
            num_heads=2,
            hidden_dim=24,
            export_dtype="float32",
        )
        metadata = json.loads((tmp_path / "heads" / "config.json").read_text())
        return load_heads(tmp_path / "heads", load(tiny_pair / "target")), metadata

    return run


def test_heads_are_exported_and_resumed(run, caplog):
    caplog.set_level("INFO", logger="spec_t5x")
    first, metadata = run(2)
    assert (metadata["heads"]["num_heads"], metadata["step"]) == (2, 2)
    assert "finished at step 2; heads in " in caplog.text
    later, metadata = run(3)
    assert "resumed at step 2" in caplog.text
    assert metadata["step"] == 3
    assert np.any(later["wo"] != first["wo"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed": True}, "packed is True and drafts learn from one pair a row: leave it"),
        ({"label_smoothing": 0.1}, "label_smoothing is 0.1 and heads are trained without"),
        ({"z_loss": 0.1}, "z_loss is 0.1 and heads are trained without"),
        ({"vocabulary": "spiece.model"}, "DataOptions.vocabulary is 'spiece.model': leave it out"),
    ],
)
def test_settings_that_heads_do_not_have(run, changes, message):
    with pytest.raises(InputError, match=message):
        run(1, **changes)


def test_heads_are_shared_out():
    target = T5Model.create({}, toy_config(384, 16))
    learner = HeadsLearner(HeadsConfig(16, 384, 2, 16), TrainOptions(steps=1), target)
    shardings = learner.shardings(make_mesh(1, 1))
    found = {name: tuple(sharding.spec) for name, sharding in shardings.items()}
    assert found == {"wi": (None, None, "model"), "wo": (None, "model", None)}
