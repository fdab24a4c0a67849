"""Attention over whole sequences: in parts where its scores would not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.models import attention
from spec_t5x.models.t5 import Transformer
from spec_t5x.testing.toy_models import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, LENGTH = 3, 11
MODEL = tiny_t5(0)
HEADS = MODEL.config.num_heads
# The second source is shorter.
SOURCES = np.random.default_rng(0).integers(2, 30, size=(BATCH, LENGTH)).astype(np.int32)
SOURCES[1, 6:] = 0
SCORES = 4 * BATCH * HEADS * LENGTH * LENGTH


def encode(sources):
    # A function of its own for each call: the limits are read while tracing.
    return MODEL.module.apply({"params": MODEL.params}, sources, method=Transformer.encode)


def shapes(jaxpr):
    """Of all that a program computes, in loops too."""
    for equation in jaxpr.eqns:
        yield from (out.aval.shape for out in equation.outvars)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from shapes(inner)


@pytest.mark.parametrize(
    ("limit", "fewest", "sizes"),
    [
        (SCORES, 1, [LENGTH]),
        # Parts of six, of which the last begins one earlier; and no fewer than five.
        (SCORES - 1, 1, [0, 5]),
        (1, 5, [0, 5]),
    ],
)
def test_in_parts_the_encoder_gives_the_same(monkeypatch, limit, fewest, sizes):
    whole = jax.jit(encode)(SOURCES)
    monkeypatch.setattr(attention, "LARGE_SCORES", limit)
    monkeypatch.setattr(attention, "FEWEST_QUERIES", fewest)
    in_parts = jax.jit(lambda sources: encode(sources))
    np.testing.assert_allclose(in_parts(SOURCES), whole, rtol=1e-5, atol=1e-5)
    computed = set(shapes(jax.make_jaxpr(lambda sources: encode(sources))(SOURCES).jaxpr))
    is_whole = sizes == [LENGTH]
    assert ((BATCH, HEADS, LENGTH, LENGTH) in computed) == is_whole
    if not is_whole:
        bias = attention.PairBias(
            jnp.zeros((1, HEADS, LENGTH, LENGTH)),
            jnp.zeros((BATCH, 1, LENGTH, LENGTH), bool),
            HEADS,
        )
        assert bias.part_starts.tolist() == sizes
