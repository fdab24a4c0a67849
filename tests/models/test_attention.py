"""Attention over whole sequences, in parts if its scores would not fit."""

import dataclasses
import functools
import re

import jax
import jax.export
import numpy as np
import pytest

from spec_t5x.models import attention
from spec_t5x.models.t5 import Transformer
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, LENGTH = 3, 11
MODEL = tiny_t5(0)
HEADS = MODEL.config.num_heads
# The second source is shorter.
SOURCES = np.random.default_rng(0).integers(2, 30, size=(BATCH, LENGTH)).astype(np.int32)
SOURCES[1, 6:] = 0
SCORES = 4 * BATCH * HEADS * LENGTH * LENGTH


def encode(sources):
    return MODEL.module.apply({"params": MODEL.params}, sources, method=Transformer.encode)


@pytest.mark.parametrize(
    ("limit", "fewest", "queries"),
    # Two parts of six, which overlap; and no fewer than five.
    [(SCORES, 1, LENGTH), (SCORES - 1, 1, 6), (1, 5, 6)],
)
def test_in_parts_the_encoder_gives_the_same(monkeypatch, limit, fewest, queries):
    whole = jax.jit(encode)(SOURCES)
    monkeypatch.setattr(attention, "LARGE_SCORES", limit)
    monkeypatch.setattr(attention, "FEWEST_QUERIES", fewest)
    # A new function: the limits are read while tracing.
    in_parts = jax.jit(lambda sources: encode(sources))
    np.testing.assert_allclose(in_parts(SOURCES), whole, rtol=1e-5, atol=1e-5)
    text = in_parts.lower(SOURCES).as_text()
    for size in (LENGTH, 6):
        assert (f"tensor<{BATCH}x{HEADS}x{size}x{LENGTH}xf32>" in text) == (size == queries)


def test_scores_and_their_softmax_are_in_float32_in_layers_of_bfloat16():
    config = dataclasses.replace(MODEL.config, dtype="bfloat16")
    given = {"params": MODEL.params}, SOURCES
    encode = functools.partial(Transformer(config).apply, method=Transformer.encode)
    program = str(jax.make_jaxpr(encode)(*given))
    shape = rf"(\w+)\[{BATCH},{HEADS},{LENGTH},{LENGTH}\] = "
    for operation in ("dot_general", "exp"):
        assert re.findall(shape + operation, program) == ["f32"]


@pytest.mark.usefixtures("unchecked")
def test_a_batch_of_any_size_is_not_split(monkeypatch):
    monkeypatch.setattr(attention, "LARGE_SCORES", 1)
    monkeypatch.setattr(attention, "FEWEST_QUERIES", 1)
    shape = jax.export.symbolic_shape(f"b, {LENGTH}")
    exported = jax.export.export(jax.jit(lambda sources: encode(sources)))(
        jax.ShapeDtypeStruct(shape, np.int32)
    )
    np.testing.assert_allclose(exported.call(SOURCES), encode(SOURCES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("platform", "count"), [("gpu", 0), ("tpu", 3), ("cpu", 3)])
def test_layouts_of_heads_are_kept_from_the_kernels_but_on_a_gpu(platform, count, monkeypatch):
    """XLA for GPUs fuses the heads' transpose and the split of one product into three."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    # A new function: the platform is read while tracing.
    traced = jax.make_jaxpr(lambda sources: encode(sources))(SOURCES)
    assert str(traced).count("optimization_barrier") == count
