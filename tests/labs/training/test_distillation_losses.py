"""Each divergence and its gradient against plain ``jax.numpy``, and known properties of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.labs.training.distillation_losses import DIVERGENCES

pytestmark = pytest.mark.usefixtures("quick_compilation")

each = pytest.mark.parametrize("name", DIVERGENCES)


def logits_of(seed, scale=2.0, shape=(2, 3, 7)):
    return jnp.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), jnp.float32)


ONES = jnp.ones((2, 3))


@functools.partial(jax.jit, static_argnums=0)
def with_gradient(divergence, target, draft, weights=ONES):
    """Returns its values, and the gradient to the draft's logits."""
    values, pull = jax.vjp(functools.partial(divergence, target), draft)
    return values, *pull(weights)


def reference(name, target_logits, draft_logits):
    """Computes the definitions, on probabilities."""
    p, q = jax.nn.softmax(target_logits), jax.nn.softmax(draft_logits)
    return {
        "forward_kl": lambda: (p * jnp.log(p / q)).sum(-1),
        "reverse_kl": lambda: (q * jnp.log(q / p)).sum(-1),
        "jeffreys": lambda: ((p - q) * jnp.log(p / q)).sum(-1),
        # The rejected probability (Theorem 3.5).
        "total_variation": lambda: 1.0 - jnp.minimum(p, q).sum(-1),
    }[name]()


@each
def test_values_and_gradients_are_those_of_the_definitions(name):
    given = logits_of(0), logits_of(1), logits_of(2, shape=(2, 3))
    values, gradients = with_gradient(DIVERGENCES[name], *given)
    expected, expected_gradients = with_gradient(functools.partial(reference, name), *given)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients, expected_gradients, rtol=1e-4, atol=1e-6)


@each
def test_a_draft_like_the_target_has_nothing_to_learn(name):
    logits = logits_of(0)
    # Logits mean the same with anything added to all of them.
    shifted, _ = with_gradient(DIVERGENCES[name], logits, logits + 2.5)
    np.testing.assert_allclose(shifted, 0.0, atol=1e-6)
    # The very same: the total variation has a kink here, whose side rounding would choose.
    _, pull = jax.vjp(jax.jit(DIVERGENCES[name]), logits, logits)
    of_target, of_draft = pull(ONES)
    np.testing.assert_allclose(of_draft, 0.0, atol=1e-6)
    # The target is not trained.
    assert not of_target.any()


@each
def test_distributions_that_are_far_apart_give_numbers(name):
    for scale in (100.0, 1e30):
        far = logits_of(0, scale), logits_of(1, scale)
        divergence, gradient = with_gradient(DIVERGENCES[name], *far)
        assert np.isfinite(divergence).all() and np.isfinite(gradient).all()
        assert np.all(divergence >= 0)
        assert name != "total_variation" or np.all(divergence <= 1.0 + 1e-6)


@each
def test_tokens_that_are_masked_in_both_models_count_for_nothing(name):
    def of_masked(*logits):
        masks = ((0, 0), (0, 0), (1, 0))
        return DIVERGENCES[name](*(jnp.pad(x, masks, constant_values=-jnp.inf) for x in logits))

    logits = logits_of(0), logits_of(1)
    expected, gradient = with_gradient(DIVERGENCES[name], *logits)
    found, of_found = with_gradient(of_masked, *logits)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(of_found, gradient, rtol=1e-4, atol=1e-6)
