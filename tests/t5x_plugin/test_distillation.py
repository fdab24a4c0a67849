"""A draft that learns from a target under T5X's trainer."""

import dataclasses

import pytest

pytest.importorskip("t5x.models", reason="needs T5X")

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import seqio
from t5x import adafactor, models, partitioning, train_state, trainer

from spec_t5x.checkpoints.loading import load
from spec_t5x.errors import InputError
from spec_t5x.labs.t5x_training.distillation import distill
from spec_t5x.labs.t5x_training.frozen_target import (
    COLLECTION,
    DraftInitializer,
    FrozenTarget,
    trainer_with_target,
    without_target,
)
from spec_t5x.labs.t5x_training.stock_network import t5x_network
from spec_t5x.labs.training.losses import token_losses
from spec_t5x.models.t5 import Transformer
from spec_t5x.sampling.distributions import overlap, sampling, standardize
from tests.t5x_plugin.toy_models import make_decoder_only_pair, run_program
from tests.t5x_plugin.toy_models import t5x_network as toy_network

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

KEY = jax.random.PRNGKey(0)
VOCAB = 128


@pytest.fixture(scope="module")
def pair(tiny_pair):
    """Provides the target's directory, and target and draft as the package loads them."""
    draft = load(tiny_pair / "draft")
    # Texts start from zeros, whose norms would give gradients of rounding errors.
    embedder = draft.params["token_embedder"]
    embedder["embedding"] = embedder["embedding"].at[0].set(jax.random.normal(KEY, (16,)))
    return tiny_pair / "target", load(tiny_pair / "target"), draft


def make_model(pair, made_by=models.EncoderDecoderModel, path=None, **options):
    """Returns a draft of the tests' pair that T5X trains."""
    directory, target, draft = pair
    vocabulary = seqio.SentencePieceVocabulary(str(directory / "spiece.model"), 0)
    regularisers = {
        name: options.pop(name)
        for name in ("z_loss", "label_smoothing", "loss_normalizing_factor")
        if name in options
    }
    stock = made_by(
        toy_network(draft.config),
        vocabulary,
        vocabulary,
        optimizer_def=adafactor.Adafactor(
            decay_rate=0.8, logical_factor_rules=adafactor.standard_logical_factor_rules()
        ),
        **regularisers,
    )
    return distill(stock, FrozenTarget(str(path or directory), "float32"), **options)


def make_batch(lengths, width=10, seed=0):
    """Returns texts of these lengths, one a row, as T5X's feature converter gives them."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), width)
    inside = np.arange(width) < np.array(lengths)[:, None]
    sources, targets = (np.where(inside, rng.integers(2, VOCAB, shape), 0) for _ in range(2))
    return {
        "encoder_input_tokens": jnp.asarray(sources, jnp.int32),
        "decoder_target_tokens": jnp.asarray(targets, jnp.int32),
        "decoder_input_tokens": jnp.asarray(np.pad(targets, ((0, 0), (1, 0)))[:, :-1], jnp.int32),
        "decoder_loss_weights": jnp.asarray(targets != 0, jnp.int32),
    }


def packed(batch, lengths):
    """Returns the same texts in one row, as T5X packs them."""

    def joined(values):
        return jnp.concatenate([row[:n] for row, n in zip(values, lengths, strict=True)])[None]

    # One padding at the end.
    row = {name: jnp.pad(joined(values), ((0, 0), (0, 1))) for name, values in batch.items()}
    segments = np.repeat(np.arange(len(lengths)) + 1, lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    for side in ("encoder", "decoder"):
        for name, values in (("segment_ids", segments), ("positions", positions)):
            row[f"{side}_{name}"] = jnp.asarray(np.pad(values, (0, 1)), jnp.int32)[None]
    return row


def loss_and_gradients(model, params, target_params, batch):
    mutables = {COLLECTION: target_params}
    with_gradients = jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))
    (loss, (metrics, _)), gradients = with_gradients(params, batch, None, mutables)
    return loss, metrics, gradients


def assert_same_gradients(found, expected):
    """Compares to 2e-5 of each array's largest entry."""
    assert jax.tree.structure(flax.core.unfreeze(found)) == jax.tree.structure(expected)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        largest = float(jnp.abs(theirs).max())
        assert largest > 0
        # Sums in another order, which depends on the processor's registers.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5 * largest)


def logits_of(loaded, params, batch):
    """Returns the logits of the package's network."""
    inputs = (batch[f"{name}_tokens"] for name in ("encoder_input", "decoder_input"))
    return Transformer(loaded.config).apply(
        {"params": params}, *inputs, batch["decoder_target_tokens"], enable_dropout=False
    )


@pytest.mark.parametrize(
    ("objective", "weight"), [("forward_kl", 0.4), ("total_variation", 1.0), ("cross_entropy", 1.0)]
)
def test_loss_and_gradients_are_the_packages_own(pair, objective, weight):
    _, target, draft = pair
    model = make_model(pair, objective=objective, weight=weight, z_loss=1e-3)
    batch = make_batch((10, 7, 3))
    found, _, gradients = loss_and_gradients(model, draft.params, target.params, batch)

    @jax.jit
    @jax.value_and_grad
    def own(params):
        return token_losses(
            logits_of(draft, params, batch),
            batch["decoder_target_tokens"],
            target_logits=logits_of(target, target.params, batch),
            distillation_weight=weight,
            objective=objective,
            z_loss=1e-3,
        ).loss

    expected, own_gradients = own(draft.params)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert_same_gradients(gradients, own_gradients)


def test_without_weight_it_is_t5xs_own_loss(pair):
    options = {"z_loss": 1e-3, "label_smoothing": 0.1, "loss_normalizing_factor": 7.0}
    model = make_model(pair, weight=0.0, **options)
    _, target, draft = pair
    batch = make_batch((10, 4))
    loss, metrics, _ = loss_and_gradients(model, draft.params, target.params, batch)
    stock = models.EncoderDecoderModel(
        model.module, model.input_vocabulary, model.output_vocabulary, None, **options
    )
    expected, theirs = jax.jit(stock.loss_fn)(draft.params, batch, None)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert set(theirs) < set(metrics)
    for name in ("loss", "z_loss", "cross_ent_loss"):
        np.testing.assert_allclose(metrics[name].total, theirs[name].total, rtol=1e-5)


def test_the_objective_is_weighted_and_normalized_as_t5xs_loss_is(pair):
    _, target, draft = pair
    model = make_model(pair, loss_normalizing_factor=7.0)
    batch = make_batch((10, 4))
    batch["decoder_loss_weights"] = 0.5 * batch["decoder_loss_weights"]
    loss, metrics, _ = loss_and_gradients(model, draft.params, target.params, batch)
    found = metrics["forward_kl"]
    assert found.count == 14
    np.testing.assert_allclose(loss, 0.5 * found.total / 7, rtol=1e-5)


def test_packed_texts_are_the_same_texts(pair):
    _, target, draft = pair
    model = make_model(pair, weight=0.7, loss_normalizing_factor="AVERAGE_PER_SEQUENCE")
    lengths = (6, 3, 9)
    batch = make_batch(lengths)
    apart, metrics, gradients = loss_and_gradients(model, draft.params, target.params, batch)
    together, of_packed, of_packed_gradients = loss_and_gradients(
        model, draft.params, target.params, packed(batch, lengths)
    )
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    for name in ("forward_kl", "alpha/temperature_1", "alpha/temperature_0"):
        assert of_packed[name].count == metrics[name].count == sum(lengths)
        np.testing.assert_allclose(of_packed[name].total, metrics[name].total, rtol=1e-5)
    assert_same_gradients(of_packed_gradients, gradients)
    # The segments matter: without them the texts read one another.
    row = packed(batch, lengths)
    mixed = {name: row[name] for name in row if not name.endswith("segment_ids")}
    _, of_mixed, _ = loss_and_gradients(model, draft.params, target.params, mixed)
    kl = "forward_kl"
    assert abs(of_mixed[kl].total - metrics[kl].total) > 1e-3 * metrics[kl].total


def test_alpha_is_that_of_the_paper(pair):
    _, target, draft = pair
    model = make_model(pair)
    batch = make_batch((10, 4, 8))
    _, metrics = jax.jit(model.eval_fn)(draft.params, batch, {COLLECTION: target.params})
    is_token = np.asarray(batch["decoder_target_tokens"]) != 0
    for temperature in (0, 1):
        probs = (
            standardize(logits_of(loaded, loaded.params, batch), sampling(float(temperature)))
            for loaded in (target, draft)
        )
        alpha = np.mean(np.asarray(overlap(*probs))[is_token])
        assert 0 < alpha < 1
        found = metrics[f"alpha/temperature_{temperature}"].compute()
        np.testing.assert_allclose(found, alpha, rtol=1e-5)


# --- under T5X's trainer -----------------------------------------------------


def make_trainer(model, batch, directory, weights):
    """Makes a trainer as ``t5x.train`` does; ``weights`` replace the draft's random ones."""
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    initializer = DraftInitializer(
        model.optimizer_def,
        model.get_initial_variables,
        {name: values.shape for name, values in batch.items()},
        partitioner,
        {name: values.dtype for name, values in batch.items()},
    )
    state = initializer.from_scratch(KEY)
    state = state.replace_params(flax.core.freeze(jax.tree.map(jnp.array, weights)))
    return trainer_with_target(
        model=model,
        train_state=state,
        partitioner=partitioner,
        train_state_axes=initializer.train_state_axes,
        eval_names=["toy"],
        summary_dir=str(directory),
        rng=KEY,
        trainer_cls=lambda **kwargs: trainer.Trainer(
            **kwargs, learning_rate_fn=lambda step: 0.003, num_microbatches=None
        ),
    ), initializer


def as_numpy(tree):
    return jax.tree.map(np.array, flax.core.unfreeze(tree))


def test_the_trainer_moves_the_draft_and_leaves_the_target(pair, tmp_path):
    _, target, draft = pair
    model = make_model(pair)
    batch = make_batch((10, 7, 3, 5))
    made, initializer = make_trainer(model, batch, tmp_path, draft.params)
    with made:
        made.compile_train(batch)
        text = made._compiled_train_step.as_text()
        first, *_, last = (made.train(iter([batch] * 10), 10).result() for _ in range(4))
        made.compile_eval({"toy": batch})
        evaluated = {
            name: each.value for name, each in made.eval({"toy": iter([batch])})["toy"].items()
        }
        state = made.train_state
    assert last["forward_kl"].value < 0.9 * first["forward_kl"].value
    assert last["alpha/temperature_1"].value > first["alpha/temperature_1"].value
    assert evaluated["forward_kl"] < first["forward_kl"].value
    assert 0 < evaluated["alpha/temperature_0"] < 1
    jax.tree.map(
        np.testing.assert_array_equal,
        as_numpy(state.flax_mutables[COLLECTION]),
        as_numpy(target.params),
    )
    # It is an argument of the program, and no part of it.
    num_arguments = sum(len(jax.tree.leaves(tree)) for tree in (state, batch))
    assert text.count(" parameter(") >= num_arguments
    # What is optimized, saved and looked for in checkpoints is the draft.
    shapes = jax.eval_shape(lambda: draft.params)
    assert jax.tree.structure(flax.core.unfreeze(state.params)) == jax.tree.structure(shapes)
    assert set(flax.core.unfreeze(state.param_states)) == set(shapes)
    saved, infos = without_target(state.state_dict(), "infos")
    expected = initializer.global_train_state_shape.state_dict()
    assert jax.tree.structure(saved) == jax.tree.structure(expected)
    assert infos == "infos"


SHARDED = """
import sys
import jax
import numpy as np
from t5x import partitioning
from spec_t5x.checkpoints.loading import load
from spec_t5x.labs.t5x_training.frozen_target import FrozenTarget

partitioner = partitioning.PjitPartitioner(
    model_parallel_submesh=(1, 1, 1, 2),
    logical_axis_rules=partitioning.standard_logical_axis_rules(),
)
params = FrozenTarget(sys.argv[1], "float32").restore(partitioner)
embedding = params["token_embedder"]["embedding"]
rows, width = embedding.shape
assert {shard.data.shape for shard in embedding.addressable_shards} == {(rows // 2, width)}
expected = load(sys.argv[1]).params
jax.tree.map(np.testing.assert_array_equal, dict(params.unfreeze()), dict(expected))
"""


def test_the_target_lies_on_the_partitioners_mesh(pair):
    run_program(SHARDED, str(pair[0]), devices=4)


class OwnLoss(models.EncoderDecoderModel):
    """A model that overrides the loss."""

    def loss_fn(self, params, batch, dropout_rng):
        raise NotImplementedError


def test_settings_that_cannot_be_honoured(pair, tiny_pair, tmp_path):
    for options, message in (
        ({"objective": "kl"}, "objective is 'kl': choose one of cross_entropy, forw"),
        ({"weight": 1.5}, "weight is 1.5"),
        ({"path": tmp_path / "absent"}, "no directory"),
        ({"path": tiny_pair / "other"}, "already holds a vocabulary"),
        ({"made_by": OwnLoss}, "OwnLoss overrides EncoderDecoderModel.loss_fn"),
    ):
        with pytest.raises(InputError, match=message):
            make_model(pair, **options)
    with pytest.raises(InputError, match="model is a DecoderOnlyModel: give a t5x"):
        distill(make_decoder_only_pair(False, False).model, FrozenTarget(str(pair[0])))
    wide = make_model(pair)
    wide.module = t5x_network(dataclasses.replace(pair[2].config, vocab_size=256))
    with pytest.raises(InputError, match="the draft embeds 256 ids and the target .* 128"):
        wide.target.check_fits(wide)
    stock = models.EncoderDecoderModel(wide.module, None, None, optimizer_def=None)
    with pytest.raises(InputError, match="MODEL is a EncoderDecoderModel: bind it"):
        trainer_with_target(
            stock,
            train_state.InferenceState(step=None, params=flax.core.freeze({})),
            partitioning.PjitPartitioner(num_partitions=1),
            trainer_cls=trainer.Trainer,
        )
