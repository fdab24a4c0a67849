"""The static cache: writes, rollback, and the logits of the training path."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.labs.testing.laws import check_target
from spec_t5x.machine.operations import XLA
from spec_t5x.models import cache as cache_lib
from spec_t5x.models.decoder_only import DecoderOnlyConfig
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, LENGTH = 3, 18
RNG = np.random.default_rng(0)
SOURCES = jnp.asarray(RNG.integers(2, 30, (BATCH, 6)), jnp.int32).at[1, 3:].set(0)
# The text of each row, start token first.
TEXTS = np.pad(RNG.integers(2, 30, (BATCH, LENGTH - 1)), ((0, 0), (1, 0))).astype(np.int32)
# Two layers, so that what the first one reads from its cache matters to the second.
MODELS = {
    "t5": lambda: tiny_t5(2, num_decoder_layers=2),
    "umt5": lambda: tiny_t5(2, num_decoder_layers=2, relpos_per_layer=True),
}
IN_INT8 = {"t5, source in int8": lambda: tiny_t5(2, num_decoder_layers=2).with_kv("int8")}


def without_kernels(target):
    return target.replace(weights=target.params, operations=XLA)


def twice(models):
    """Returns names of models, each also for the model without the machine's kernels."""
    return [*models, *(f"{name}, by XLA" for name in models)]


# One program for each size of chunk.
SCORE = jax.jit(lambda model, cache, tokens: model.score(cache, tokens)[::2])


@functools.cache
def model(name="t5"):
    name, *without = name.split(", by XLA")
    made = (MODELS | IN_INT8)[name]()
    return without_kernels(made) if without else made


@functools.cache
def empty_cache(name="t5"):
    return jax.jit(lambda model: model.prefill(SOURCES, LENGTH + 4))(model(name))


@pytest.mark.parametrize(("batch", "new"), [(1, 1), (1, 3), (4, 1), (4, 3)])
def test_a_write_replaces_exactly_its_positions(batch, new):
    rng = np.random.default_rng(1)
    cached = rng.normal(size=(batch, 2, 8, 3)).astype(np.float32)
    update = rng.normal(size=(batch, 2, new, 3)).astype(np.float32)
    starts = np.array([5, 0, 3, 8 - new])[:batch]
    expected = cached.copy()
    for row, start in enumerate(starts):
        expected[row, :, start : start + new] = update[row]
    written = cache_lib.write(jnp.asarray(cached), jnp.asarray(update), jnp.asarray(starts))
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("name", twice(MODELS | IN_INT8))
def test_its_calls_agree_with_one_another(name):
    """Calls are in blocks of any size, after rollbacks, in trees and in repeated rows."""
    check_target(model(name), SOURCES)


@pytest.mark.parametrize("name", twice(MODELS))
def test_cached_logits_are_the_teacher_forced_ones(name):
    target, cache, found = model(name), empty_cache(name), []
    inputs = (SOURCES, TEXTS, np.ones_like(TEXTS))
    inputs = inputs if target.config.has_source else inputs[1:2]
    forward = functools.partial(target.module.apply, enable_dropout=False)
    expected = jax.jit(forward)({"params": target.params}, *inputs)
    # The lengths are data: one text in chunks of two sizes, and refused tokens in between.
    for start, end in ((0, 4), (4, 5), (5, 9), (9, 10), (10, 14), (14, 18)):
        _, refused = SCORE(target, cache, TEXTS[::-1, :4])
        cache = target.rollback(refused, cache.lengths)
        logits, cache = SCORE(target, cache, TEXTS[:, start:end])
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, 1), expected, atol=1e-4, rtol=1e-5)
    np.testing.assert_array_equal(cache.lengths, LENGTH)


@pytest.mark.parametrize("name", twice(["t5"]))
def test_slots_beyond_a_rows_length_have_no_influence(name):
    _, cache = SCORE(model(name), empty_cache(name), TEXTS[:, :4])
    cache = model(name).rollback(cache, jnp.array([3, 1, 2]))
    beyond = (jnp.arange(cache.max_length)[None] >= cache.lengths[:, None])[:, None, :, None]
    spoilt = cache.map(lambda cached: jnp.where(beyond, 1e4, cached))
    clean, _ = SCORE(model(name), cache, TEXTS[:, 4:6])
    after, _ = SCORE(model(name), cache.replace(layers=spoilt.layers), TEXTS[:, 4:6])
    np.testing.assert_array_equal(clean, after)


def test_a_rollback_touches_no_array_but_the_lengths():
    cache, lengths = empty_cache(), jnp.array([3, 0, 2])
    rolled = cache.at(lengths)
    assert rolled.lengths is lengths
    kept = rolled.replace(lengths=cache.lengths)
    assert all(map(operator.is_, jax.tree.leaves(kept), jax.tree.leaves(cache)))


def test_rows_of_one_source_share_its_keys_and_values():
    _, cache = SCORE(model(), empty_cache(), TEXTS[:, :4])
    cache = model().rollback(cache, jnp.array([3, 1, 2]))
    shared = cache.repeat_rows(2)
    np.testing.assert_array_equal(shared.lengths, [3, 3, 1, 1, 2, 2])
    for layer, before in zip(shared.layers, cache.layers, strict=True):
        assert layer.cross_keys is before.cross_keys and layer.cross_values is before.cross_values
        # Of a text there is a copy beside it, for each row.
        np.testing.assert_array_equal(layer.keys, np.repeat(before.keys, 2, axis=0))
        np.testing.assert_array_equal(layer.values, np.repeat(before.values, 2, axis=0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale_in_int8_is_of_one_head_and_position(dtype):
    numbers = RNG.normal(size=(2, 3, 5, 16)) * 10.0 ** RNG.integers(-3, 3, (2, 3, 5, 1))
    heads = jnp.asarray(numbers, dtype).at[0, 0, 0].set(0)
    rounded = jax.jit(cache_lib.RoundedHeads.of)(heads)
    assert rounded.values.dtype == jnp.int8 and rounded.shape == heads.shape
    assert rounded.scales.dtype == heads.dtype and rounded.scales.shape == (2, 3, 1, 5)
    # The largest is 127 steps, give or take the rounding of a scale in bfloat16.
    largest = np.abs(np.asarray(rounded.values, np.int32)).max(axis=-1)
    assert largest[0, 0, 0] == 0 and largest.reshape(-1)[1:].min() > 125
    scales = np.asarray(rounded.scales, np.float64).swapaxes(2, 3)
    off = np.abs(np.asarray(rounded.values) * scales - np.asarray(heads, np.float64))
    assert np.all(off <= scales * (0.5001 if dtype == "float32" else 0.8))


def test_numbers_that_are_not_finite_are_not_hidden_by_rounding():
    heads = jnp.ones((1, 1, 3, 4)).at[0, 0, 0, 1].set(jnp.nan).at[0, 0, 1, 2].set(jnp.inf)
    rounded = cache_lib.RoundedHeads.of(heads)
    products = rounded.values.sum(-1) * rounded.scales[:, :, 0]
    np.testing.assert_array_equal(np.isfinite(products), [[[False, False, True]]])


@pytest.mark.parametrize("name", twice(IN_INT8))
def test_a_source_in_int8_is_read_as_its_numbers_times_their_scales(name):
    """The logits are those of a cache of wide numbers, and not those of the target's own."""
    cache, own = empty_cache(name), empty_cache()

    def widened(rounded):
        return rounded.values * rounded.scales.swapaxes(2, 3)

    layers = tuple(
        layer.replace(
            cross_keys=widened(layer.cross_keys), cross_values=widened(layer.cross_values)
        )
        for layer in cache.layers
    )
    found, wide, exact = (
        SCORE(model(name), each, TEXTS)[0] for each in (cache, cache.replace(layers=layers), own)
    )
    np.testing.assert_allclose(found, wide, atol=5e-5)
    assert 1e-3 < np.median(np.abs(found - exact)) < 0.1


def test_an_empty_cache_has_as_many_heads_as_there_are_of_keys():
    """A decoder that shares a target's encoder may have fewer heads of keys than of queries."""

    @dataclasses.dataclass(frozen=True)
    class Grouped(DecoderOnlyConfig):
        num_kv_heads: int = 2

    layers = cache_lib.KVCache.empty(Grouped(), BATCH, LENGTH).layers
    assert layers[0].keys.shape == layers[0].values.shape == (BATCH, 2, LENGTH, 64)
