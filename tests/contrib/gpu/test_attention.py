"""GPU kernels of attention, run by JAX's interpreter, against NumPy and plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.contrib.gpu import attention, kernels
from spec_t5x.contrib.gpu.kernels import dot
from spec_t5x.models.attention import MASKED
from tests.contrib.gpu.test_products import drawn

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Weights and contexts in tiles are in bfloat16.
TOLERANCE = {False: 1e-4, True: 4e-2}


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


@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("num", [1, 3, kernels.TILE])
# One round of all slots, and two.
@pytest.mark.parametrize("width", [16, 64])
def test_attention_to_text(width, num, in_tiles):
    batch, heads, length = 4, 2, 150
    dtype = "bfloat16" if in_tiles else "float32"
    queries, *new = (drawn(i, batch, num, heads * width, dtype=dtype) for i in range(3))
    cache = [drawn(i, batch, heads, length, width, dtype=dtype) for i in (3, 4)]
    table = drawn(5, heads, length)
    # The last row has ended: its tokens do not fit.
    starts = jnp.asarray([0, 63, length - num, length - 1], jnp.int32)
    found = attention.attend_to_text([queries, *new], *cache, starts, table, in_tiles=in_tiles)
    wanted = text_attention(queries, new, cache, starts, table)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=TOLERANCE[in_tiles])
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
# The longest has five rounds of 512 keys: two parts of two, and one of one.
@pytest.mark.parametrize("length", [7, 64, 130, 520, 2500])
def test_attention_to_sources(length, rounded, in_tiles, monkeypatch):
    sides = []

    def noted(a, b, axis):
        sides.extend(a.shape + b.shape)
        return dot(a, b, axis)

    monkeypatch.setattr(attention, "dot", noted)
    inputs, repeats, heads, width, num = 2, 3, 2, 16, 5
    dtype = "bfloat16" if in_tiles else "float32"
    queries = drawn(0, inputs * repeats, num, heads * width, dtype=dtype)
    keys, values = (drawn(i, inputs, heads, length, width, dtype=dtype) for i in (1, 2))
    bias = jnp.where(jnp.arange(length)[None] < jnp.asarray([[length], [4]]), 0.0, MASKED)
    scales, given = (), (keys, values)
    if rounded:
        scales = [jnp.abs(drawn(i, inputs, heads, 1, length)) / 64 for i in (3, 4)]
        given = [jnp.round(each * 40).astype(jnp.int8) for each in (keys, values)]
        keys, values = (
            each * scale.swapaxes(2, 3) for each, scale in zip(given, scales, strict=True)
        )
    found = attention.attend_to_source(queries, *given, bias, scales, in_tiles=in_tiles)
    if not in_tiles:
        found = found.of_all_keys((Ellipsis,), slice(None))
    queries, keys, values = (each.astype(jnp.float32) for each in (queries, keys, values))
    apart = queries.reshape(inputs, repeats, num, heads, width)
    scores = jnp.einsum("irnhd,ihsd->irhns", apart, keys) + bias[:, None, None, None]
    wanted = jnp.einsum("irhns,ihsd->irnhd", jax.nn.softmax(scores), values)
    tolerance = TOLERANCE[in_tiles]
    np.testing.assert_allclose(found, wanted.reshape(found.shape), rtol=1e-4, atol=tolerance)
    # Tensor cores multiply no smaller matrices.
    assert min(sides, default=kernels.TILE) >= kernels.TILE and bool(sides) == in_tiles
