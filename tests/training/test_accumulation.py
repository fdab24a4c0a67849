"""A batch read in parts: the same step, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spec_t5x.training.learners import Network
from spec_t5x.training.trainer import TrainOptions, init_state, make_train_step
from tests.training.toys import toy_config

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

CONFIG = toy_config(64, 16, dropout_rate=0.0)


def make_inputs(rows, length=12):
    """Texts of very different lengths: a mean of the parts' means is another."""
    rng = np.random.default_rng(0)
    text = rng.integers(2, 64, (rows, length)).astype(np.int32)
    text[np.arange(length) >= np.linspace(1, length, rows).astype(int)[:, None]] = 0
    return text[:, ::-1], np.pad(text[:, :-1], ((0, 0), (1, 0))), text


def take_step(inputs, parts):
    options = TrainOptions(steps=1, accumulation_steps=parts, label_smoothing=0.1)
    learner, optimizer = Network(CONFIG, options), optax.sgd(1.0)
    step = make_train_step(learner, optimizer)
    return step(init_state(learner, optimizer), inputs, jax.random.key(1), None)


def test_the_step_is_that_of_the_whole_batch():
    """By plain descent at rate 1, the parameters show the gradient itself."""
    inputs = make_inputs(7)
    (whole, sums), (divided, sums_of_parts) = (take_step(inputs, parts) for parts in (1, 3))
    start = init_state(Network(CONFIG, TrainOptions(steps=1)), optax.sgd(1.0)).params
    for before, ours, theirs in zip(
        *map(jax.tree.leaves, (start, divided.params, whole.params)), strict=True
    ):
        scale = float(jnp.abs(theirs - before).max())
        assert scale > 0
        np.testing.assert_allclose(ours - before, theirs - before, atol=1e-5 * scale + 1e-8)
    assert sums_of_parts.num_tokens == sums.num_tokens == np.count_nonzero(inputs[2])
    for name in ("loss", "cross_entropy", "num_correct", "gradient_norm"):
        assert float(getattr(sums_of_parts, name)) == pytest.approx(
            float(getattr(sums, name)), rel=1e-5
        )


def test_it_takes_less_memory():
    optimizer, inputs = optax.sgd(1.0), make_inputs(64)

    def temporary_bytes(parts):
        learner = Network(CONFIG, TrainOptions(steps=1, accumulation_steps=parts))
        state, step = init_state(learner, optimizer), make_train_step(learner, optimizer)
        compiled = step.lower(state, inputs, jax.random.key(1), None).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8) < 0.4 * temporary_bytes(1)
