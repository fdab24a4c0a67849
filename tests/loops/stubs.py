"""Stub models with known outputs, and helpers that read keys and the loops' results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def no_prompts(batch):
    """Returns int32 prompts [batch, 1] of only the start token, 0."""
    return jnp.zeros((batch, 1), jnp.int32)


def texts(decoded):
    """Returns the tokens of each row's first decode, without padding."""
    rows = zip(np.asarray(decoded.tokens[:, 0]), decoded.lengths[:, 0].tolist(), strict=True)
    return [row[:length].tolist() for row, length in rows]


def assert_same_decodes(decoded, plain, atol=1e-4):
    """Asserts that results have the same tokens and lengths, and scores up to rounding."""
    np.testing.assert_array_equal(decoded.tokens, plain.tokens)
    np.testing.assert_array_equal(decoded.lengths, plain.lengths)
    np.testing.assert_allclose(decoded.scores, plain.scores, rtol=1e-6, atol=atol)


def bits(keys):
    """Returns random keys as tuples, to compare and to put in sets."""
    return [tuple(row) for row in np.asarray(jax.random.key_data(keys)).reshape(-1, 2).tolist()]


def drain(steps):
    """Returns a generator's yielded iterations and its return value."""
    iterations = []
    while True:
        try:
            iterations.append(next(steps))
        except StopIteration as stop:
            return iterations, stop.value


@functools.cache
def writes_the_source(vocab):
    """Returns a function whose logits make the output the source's tokens, then zeros."""

    def next_logits(sources, prefixes):
        width = prefixes.shape[1]
        copied = jnp.pad(sources, ((0, 0), (0, width)))[:, :width]
        return 9.0 * jax.nn.one_hot(copied, vocab)

    return next_logits


@functools.cache
def counts_upwards(vocab):
    """Returns a function whose logits make t + 1 follow token t."""
    return lambda sources, prefixes: 9.0 * jax.nn.one_hot(prefixes + 1, vocab)


@jax.jit
def teacher_forced(model, sources, prefixes):
    """Computes a T5's logits [batch, length, vocab] of whole ``prefixes``, without a cache."""
    inputs = (sources, prefixes, jnp.ones_like(prefixes))
    return model.module.apply({"params": model.params}, *inputs, enable_dropout=False)
