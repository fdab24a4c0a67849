"""Each divergence against plain ``jax.numpy``, its gradient too, and what is known of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.training.distillation_losses import DIVERGENCES

pytestmark = pytest.mark.usefixtures("quick_compilation")

each = pytest.mark.parametrize("name", DIVERGENCES)


def logits_of(seed, scale=2.0, shape=(2, 3, 7)):
    return jnp.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), jnp.float32)


def reference(name, target_logits, draft_logits):
    """The definitions, on probabilities."""
    p, q = jax.nn.softmax(target_logits), jax.nn.softmax(draft_logits)
    return {
        "forward_kl": lambda: (p * jnp.log(p / q)).sum(-1),
        "reverse_kl": lambda: (q * jnp.log(q / p)).sum(-1),
        "jeffreys": lambda: ((p - q) * jnp.log(p / q)).sum(-1),
        # What is refused (Theorem 3.5).
        "total_variation": lambda: 1.0 - jnp.minimum(p, q).sum(-1),
    }[name]()


@each
def test_values_and_gradients_are_those_of_the_definitions(name):
    target, draft, weights = logits_of(0), logits_of(1), logits_of(2, shape=(2, 3))

    def weighted(divergence):
        return lambda draft: (divergence(target, draft) * weights).sum()

    ours = DIVERGENCES[name]

    def theirs(target, draft):
        return reference(name, target, draft)

    np.testing.assert_allclose(ours(target, draft), theirs(target, draft), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        jax.grad(weighted(ours))(draft), jax.grad(weighted(theirs))(draft), rtol=1e-4, atol=1e-6
    )


@each
def test_a_draft_like_the_target_has_nothing_to_learn(name):
    logits = logits_of(0)
    # Logits mean the same with anything added to all of them.
    np.testing.assert_allclose(DIVERGENCES[name](logits, logits + 2.5), 0.0, atol=1e-6)
    # The very same: the total variation has a kink here, whose side rounding would choose.
    _, pull = jax.vjp(DIVERGENCES[name], logits, logits)
    of_target, of_draft = pull(jnp.ones((2, 3)))
    np.testing.assert_allclose(of_draft, 0.0, atol=1e-6)
    # The target is not trained.
    assert not of_target.any()


@each
def test_distributions_that_are_far_apart_give_numbers(name):
    for scale in (100.0, 1e30):
        divergence, pull = jax.vjp(
            lambda draft, scale=scale: DIVERGENCES[name](logits_of(0, scale), draft),
            logits_of(1, scale),
        )
        (gradient,) = pull(jnp.ones((2, 3)))
        assert np.isfinite(divergence).all() and np.isfinite(gradient).all()
        assert np.all(divergence >= 0)
        assert name != "total_variation" or np.all(divergence <= 1.0 + 1e-6)


@each
def test_tokens_that_neither_may_say_count_for_nothing(name):
    target, draft = logits_of(0), logits_of(1)
    expected, pull = jax.vjp(lambda draft: DIVERGENCES[name](target, draft), draft)
    (gradient,) = pull(jnp.ones((2, 3)))

    def masked(logits):
        return jnp.pad(logits, ((0, 0), (0, 0), (1, 0)), constant_values=-jnp.inf)

    ours, pull = jax.vjp(lambda draft: DIVERGENCES[name](masked(target), masked(draft)), draft)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(pull(jnp.ones((2, 3)))[0], gradient, rtol=1e-4, atol=1e-6)
