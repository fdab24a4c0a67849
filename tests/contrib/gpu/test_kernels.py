"""GPU kernels, run by JAX's interpreter, against plain JAX; and as Triton code for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.contrib.gpu import kernels
from spec_t5x.contrib.gpu.transposed import Transposed
from spec_t5x.models.attention import MASKED
from spec_t5x.models.layers import RMSNorm, activated
from spec_t5x.models.weights import Rounded

pytestmark = pytest.mark.usefixtures("quick_compilation")

INNER, FEATURES = 48, 80
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def drawn(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def expected(states, matrices, norm, activations, residual):
    if norm is not None:
        scale = {"params": {"scale": norm.scale}}
        states = RMSNorm(norm.epsilon, str(states.dtype)).apply(scale, states)
    results = [jnp.dot(states, matrix.astype(states.dtype)) for matrix in matrices]
    if activations:
        results = [activated(activations, results)]
    return results if residual is None else [residual + results[0]]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 64, kernels.MOST_ROWS * kernels.MOST_TOKENS])
@pytest.mark.parametrize(
    ("num", "normed", "activations", "added"),
    [
        (1, False, (), False),
        (3, True, (), False),
        (2, True, ("gelu", "linear"), False),
        (1, True, ("relu",), False),
        (1, False, (), True),
    ],
)
def test_products(dtype, rows, num, normed, activations, added):
    states = drawn(0, rows, INNER, dtype=dtype)
    matrices = [drawn(i + 1, INNER, FEATURES, dtype=dtype) / 7 for i in range(num)]
    norm = kernels.Norm(drawn(8, INNER, dtype=dtype), 1e-6) if normed else None
    residual = drawn(9, rows, FEATURES, dtype=dtype) if added else None
    given = activations, residual
    wanted = expected(states, matrices, norm, *given)
    multiply = functools.partial(kernels.multiply, activations=activations)
    found = multiply(states, [Transposed.of(m) for m in matrices], norm, residual=residual)
    assert len(found) == len(wanted)
    for product, reference in zip(found, wanted, strict=True):
        assert product.dtype == dtype and product.shape == (rows, FEATURES)
        scale = float(jnp.abs(reference).max())
        difference = jnp.abs(product.astype(jnp.float32) - reference.astype(jnp.float32))
        assert float(difference.max()) <= TOLERANCE[dtype] * scale


def test_products_of_matrices_in_int8():
    states, matrix = drawn(0, 3, INNER), Rounded.of(drawn(1, INNER, FEATURES))
    (found,) = kernels.multiply(states, [Transposed.of(matrix)])
    np.testing.assert_allclose(found, matrix.times(states), rtol=1e-5, atol=1e-5)


def test_logits_of_bfloat16_states_are_not_rounded():
    states, matrix = (drawn(i, 16, 16, dtype=jnp.bfloat16) for i in range(2))
    (found,) = kernels.multiply(states, [Transposed.of(matrix)], dtype="float32")
    wanted = np.asarray(states, np.float32) @ np.asarray(matrix, np.float32)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 100), (40, 32)])
def test_matrices_that_do_not_fit(shape):
    assert not kernels.fits(Transposed.of(drawn(0, *shape)))


def text_attention(queries, new, cache, starts, table):
    """Returns contexts and cache by loops over rows, heads and tokens."""
    keys, values = (np.array(each, np.float64) for each in cache)
    (batch, heads, length, width), num = keys.shape, queries.shape[1]
    given = [np.asarray(each, np.float64).reshape(batch, num, heads, width) for each in new]
    queries = np.asarray(queries, np.float64).reshape(batch, num, heads, width)
    contexts = np.zeros_like(queries)
    for row, start in enumerate(np.asarray(starts)):
        slot = min(start, length - num)
        for cached, fresh in zip((keys, values), given, strict=True):
            cached[row, :, slot : slot + num] = fresh[row].swapaxes(0, 1)
        for head in range(heads):
            for token in range(num):
                distances = start + token - np.arange(length)
                bias = np.asarray(table, np.float64)[head, np.clip(distances, 0, length - 1)]
                bias = np.where(distances >= 0, bias, MASKED)
                scores = keys[row, head] @ queries[row, token, head] + bias
                weights = np.exp(scores - scores.max())
                contexts[row, token, head] = weights @ values[row, head] / weights.sum()
    return contexts.reshape(batch, num, -1), keys, values


@pytest.mark.parametrize("num", [1, 3, kernels.MOST_TOKENS])
def test_attention_to_text(num):
    batch, heads, length, width = 4, 2, 150, 16
    queries, *new = (drawn(i, batch, num, heads * width) for i in range(3))
    cache = [drawn(i, batch, heads, length, width) for i in (3, 4)]
    table = drawn(5, heads, length)
    # The last row has ended: its tokens do not fit.
    starts = jnp.asarray([0, 63, length - num, length - 1], jnp.int32)
    found = kernels.attend_to_text([queries, *new], *cache, starts, table)
    for ours, wanted in zip(found, text_attention(queries, new, cache, starts, table), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("length", [7, 64, 130, 520, 2600])
def test_attention_to_sources(length, rounded):
    inputs, repeats, heads, width, num = 2, 3, 2, 16, 5
    queries = drawn(0, inputs * repeats, num, heads * width)
    keys, values = (drawn(i, inputs, heads, length, width) for i in (1, 2))
    bias = jnp.where(jnp.arange(length)[None] < jnp.asarray([[length], [4]]), 0.0, MASKED)
    scales, given = (), (keys, values)
    if rounded:
        scales = [jnp.abs(drawn(i, inputs, heads, 1, length)) / 64 for i in (3, 4)]
        given = [jnp.round(each * 40).astype(jnp.int8) for each in (keys, values)]
        keys, values = (
            each * scale.swapaxes(2, 3) for each, scale in zip(given, scales, strict=True)
        )
    contexts = kernels.attend_to_source(queries, *given, bias, scales)
    found = contexts.of_all_keys((Ellipsis,), slice(None))
    apart = queries.reshape(inputs, repeats, num, heads, width)
    scores = jnp.einsum("irnhd,ihsd->irhns", apart, keys) + bias[:, None, None, None]
    wanted = jnp.einsum("irhns,ihsd->irnhd", jax.nn.softmax(scores), values)
    np.testing.assert_allclose(found, wanted.reshape(found.shape), rtol=1e-4, atol=1e-4)
