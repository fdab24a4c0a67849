"""A batch read in parts: the same gradient, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.labs.training.accumulation import mean_gradient
from spec_t5x.labs.training.losses import LossSums, token_losses

pytestmark = pytest.mark.usefixtures("quick_compilation")

RNG = np.random.default_rng(0)
PARAMS = {
    "embedding": jnp.asarray(RNG.normal(size=(64, 16)), jnp.float32),
    "kernel": jnp.asarray(RNG.normal(size=(16, 64)), jnp.float32),
}


def make_inputs(rows, length=12):
    """Texts of very different lengths: a mean of the parts' means is another."""
    text = RNG.integers(2, 64, (rows, length)).astype(np.int32)
    text[np.arange(length) >= np.linspace(1, length, rows).astype(int)[:, None]] = 0
    return text[:, ::-1], np.pad(text[:, :-1], ((0, 0), (1, 0))), text


def loss(params, inputs, key, frozen):
    logits = params["embedding"][inputs[1]] @ params["kernel"]
    return token_losses(logits, inputs[2], label_smoothing=0.1)


def compiled(inputs, parts):
    gradient = jax.jit(mean_gradient(loss, parts))
    return gradient.lower(PARAMS, inputs, jax.random.key(1), None).compile()


def test_the_gradient_is_that_of_the_whole_batch():
    inputs = make_inputs(7)
    arguments = PARAMS, inputs, jax.random.key(1), None
    (whole, sums), (divided, sums_of_parts) = (compiled(inputs, n)(*arguments) for n in (1, 3))
    for ours, theirs in zip(*map(jax.tree.leaves, (divided, whole)), strict=True):
        scale = float(jnp.abs(theirs).max())
        assert scale > 0
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * scale)
    assert sums_of_parts.num_tokens == sums.num_tokens == np.count_nonzero(inputs[2])
    for name in ("loss", "cross_entropy", "num_correct"):
        np.testing.assert_allclose(getattr(sums_of_parts, name), getattr(sums, name), rtol=1e-5)


def test_each_part_has_its_own_key():
    """Else all parts of a batch would have the same dropout."""

    def noisy(params, inputs, key, frozen):
        zero = jnp.float32(0)
        loss = params * jax.random.uniform(key)
        return LossSums(loss=loss, cross_entropy=zero, num_correct=zero, num_tokens=zero + 1)

    key, rows = jax.random.key(1), jnp.ones((4, 2), jnp.int32)
    gradient, sums = jax.jit(mean_gradient(noisy, 2))(jnp.float32(3.0), (rows,), key, None)
    drawn = [float(jax.random.uniform(jax.random.fold_in(key, part))) for part in range(2)]
    assert float(sums.loss) == pytest.approx(3 * sum(drawn))
    # The gradient of the mean over both tokens.
    assert float(gradient) == pytest.approx(sum(drawn) / 2)


def test_it_takes_less_memory():
    inputs = make_inputs(64)
    whole, divided = (compiled(inputs, n).memory_analysis().temp_size_in_bytes for n in (1, 8))
    assert divided < 0.4 * whole
