"""EAGLE heads that learn under T5X's trainer: as ``spec-t5x distill`` teaches them."""

import pytest

pytest.importorskip("t5x.models", reason="needs T5X")

import flax.core
import jax
import numpy as np
import seqio
from flax.traverse_util import flatten_dict
from t5x import adafactor, models, partitioning

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.native.target_drafts import EAGLE, load_shared_draft
from spec_t5x.errors import InputError
from spec_t5x.labs.t5x_training.frozen_target import COLLECTION, DraftInitializer, FrozenTarget
from spec_t5x.labs.t5x_training.head_distillation import distill_head
from spec_t5x.labs.training.distill import DistillOptions, DraftLearner
from spec_t5x.labs.training.first_head import first_head
from spec_t5x.labs.training.interfaces import TrainOptions
from spec_t5x.labs.training.run_distill import KeptLayers
from spec_t5x.labs.training.student import Student
from tests.t5x_plugin.test_distillation import (
    OwnLoss,
    assert_same_gradients,
    loss_and_gradients,
    make_batch,
    packed,
)
from tests.t5x_plugin.toy_models import make_decoder_only_pair, t5x_network

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

KEY = jax.random.PRNGKey(0)
OF_HEADS = {
    "wide": {"unrolled_steps": 3},
    "narrow": {"unrolled_steps": 2, "width": 8, "depths": (0,)},
}


@pytest.fixture(scope="module")
def target(tiny_pair):
    return load(tiny_pair / "target")


def make_model(target, objective="jeffreys", weight=1.0, made_by=None, **of_head):
    vocabulary = seqio.SentencePieceVocabulary(str(target.directory / "spiece.model"), 0)
    rules = adafactor.standard_logical_factor_rules()
    stock = (made_by or models.EncoderDecoderModel)(
        t5x_network(target.config),
        vocabulary,
        vocabulary,
        optimizer_def=adafactor.Adafactor(decay_rate=0.8, logical_factor_rules=rules),
    )
    layers = KeptLayers(decoder="last:1", **of_head)
    frozen = FrozenTarget(str(target.directory), "float32")
    return distill_head(stock, frozen, layers, objective, weight)


def first_state(model, batch):
    """Returns the first train state, as ``t5x.train`` makes it."""
    return DraftInitializer(
        model.optimizer_def,
        model.get_initial_variables,
        {name: values.shape for name, values in batch.items()},
        partitioning.PjitPartitioner(num_partitions=1),
    ).from_scratch(KEY)


def assert_same_start(found, expected):
    """Compares parameters to float32's rounding, and principal components to 1 %, up to signs.

    A component is an eigenvector: its error is that of the matrix, divided by a gap of eigenvalues.
    """
    found, expected = map(flatten_dict, (found, expected))
    assert found.keys() == expected.keys()
    reduction, output = ("reduction", "kernel"), ("decoder", "logits_dense", "kernel")
    signs = np.sign(np.sum(found[reduction] * expected[reduction], axis=0))
    turns = {reduction: signs, output: signs[:, None]}
    for path, own in expected.items():
        error = 0.01 * np.abs(own).max() if path in turns else 1e-6
        np.testing.assert_allclose(
            found[path], turns.get(path, 1.0) * own, rtol=1e-5, atol=error, err_msg=str(path)
        )


@pytest.mark.parametrize("kind", OF_HEADS)
def test_loss_and_gradients_are_the_packages_own(target, kind, tmp_path):
    model, batch = make_model(target, **OF_HEADS[kind]), make_batch((10, 7, 3))
    state = first_state(model, batch)
    config = model._student.config
    assert (config.emb_dim < target.config.emb_dim) == (kind == "narrow")
    layers = (target.config.num_decoder_layers - 1,)
    own = first_head(jax.random.wrap_key_data(KEY), target.params, target.config, config, layers)
    params = flax.core.unfreeze(state.params)
    assert_same_start(params, own)
    # A step away from where the fusion passes only the embedding or the state.
    keys = iter(jax.random.split(KEY, 99))
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), params
    )
    found, metrics, gradients = loss_and_gradients(model, params, target.params, batch)
    student = Student(
        config=config,
        params=params,
        shared_layers=layers,
        unrolled_steps=OF_HEADS[kind]["unrolled_steps"],
    )
    options = TrainOptions(steps=1, objective="jeffreys", distillation_weight=1.0)
    bound = target.bind().showing(config.depths)
    learner = DraftLearner(
        student=student, target=bound, distillation=DistillOptions(), options=options
    )
    inputs = tuple(
        batch[f"{name}_tokens"] for name in ("encoder_input", "decoder_input", "decoder_target")
    )

    @jax.jit
    @jax.value_and_grad
    def own_loss(params):
        return learner.loss(params, inputs, None, target.params).loss

    expected, own_gradients = own_loss(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert_same_gradients(gradients, own_gradients)
    assert 0 < metrics["alpha/temperature_1"].compute() < 1
    # What is written is what was learnt.
    model.save(tmp_path, params, target.params, step=3)
    head = load_shared_draft(tmp_path, target, EAGLE)
    jax.tree.map(np.testing.assert_array_equal, head.params, params)
    assert (head.config, head.layers) == (config, layers)


def test_the_head_drops_out_and_the_target_does_not(target):
    batch = make_batch((6, 3))
    model = make_model(target, unrolled_steps=2, dropout_rate=0.5)
    params = first_state(model, batch).params
    losses = [
        model.loss_fn(params, batch, key, {COLLECTION: target.params})[0]
        for key in (None, None, KEY)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_what_cannot_be_learnt(target):
    batch = make_batch((6, 3))
    model = make_model(target, unrolled_steps=2)
    params = first_state(model, batch).params
    with pytest.raises(InputError, match="one text from each row and these are packed: set utils"):
        loss_and_gradients(model, params, target.params, packed(batch, (6, 3)))
    for options, message in (
        ({}, "unrolled_steps is 0: give the steps"),
        ({"unrolled_steps": 2, "draft_vocab_size": 50}, "draft_vocab_size is 50: leave it None"),
        ({"unrolled_steps": 2, "depths": (7,)}, r"states of layers \[7\], the decoder"),
        ({"unrolled_steps": 2, "made_by": OwnLoss}, "OwnLoss overrides"),
    ):
        with pytest.raises(InputError, match=message):
            make_model(target, **options)
    lm = make_decoder_only_pair(False, False).model
    with pytest.raises(InputError, match="model is a DecoderOnlyModel: give a t5x"):
        distill_head(lm, FrozenTarget(str(target.directory)), KeptLayers(unrolled_steps=1))
