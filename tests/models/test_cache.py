"""The static cache: every way to feed a text in chunks gives the same logits."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.models import cache as cache_lib
from spec_t5x.testing.toy_models import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

BATCH, LENGTH, LARGEST_CHUNK = 3, 18, 4
RNG = np.random.default_rng(0)
SOURCES = jnp.asarray(RNG.integers(2, 30, (BATCH, 6)), jnp.int32).at[1, 3:].set(0)
# The text of each row, start token first, and tokens that refused drafts may leave behind.
TEXTS = np.pad(RNG.integers(2, 30, (BATCH, LENGTH - 1)), ((0, 0), (1, 0))).astype(np.int32)
REFUSED = RNG.integers(2, 30, (BATCH, LENGTH)).astype(np.int32)


# write


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


# T5Model.score


# Two layers, so that what the first one reads from its cache matters to the second.
MODELS = {
    "t5": lambda: tiny_t5(2, num_decoder_layers=2),
    "umt5": lambda: tiny_t5(2, num_decoder_layers=2, relpos_per_layer=True),
}


@functools.cache
def model(name="t5"):
    return MODELS[name]()


# One program for each size of chunk.
SCORE = jax.jit(lambda model, cache, tokens: model.score(cache, tokens)[::2])


@functools.cache
def empty_cache(name="t5"):
    return jax.jit(lambda model: model.prefill(SOURCES, LENGTH + LARGEST_CHUNK))(model(name))


@functools.cache
def expected_logits(name="t5"):
    """Returns logits of the whole texts by the training path, which has no cache."""

    @jax.jit
    def teacher_forced(model):
        texts = jnp.asarray(TEXTS)
        inputs = (SOURCES, texts, jnp.ones_like(texts))
        inputs = inputs if model.config.has_source else inputs[1:2]
        return model.module.apply({"params": model.params}, *inputs, enable_dropout=False)

    return np.asarray(teacher_forced(model(name)))


class Feeder:
    """A cache, and the number of ``valid`` tokens of the text in each of its rows."""

    def __init__(self, name="t5"):
        self.name, self.cache = name, empty_cache(name)
        self.valid = np.zeros(BATCH, int)

    def feed(self, size, back, good):
        """Rolls row b back by ``back[b]``, then feeds ``size`` tokens and checks them.

        The first ``good[b]`` tokens are the text's; the others are wrong, and the
        next call rolls them back.
        """
        starts = np.maximum(self.valid - back, 0)
        # Near the end of the text the rest of the chunk is wrong in any case.
        good = np.minimum(np.minimum(good, size), LENGTH - starts)
        tokens = np.zeros((BATCH, size), np.int32)
        for row in range(BATCH):
            chunk = slice(starts[row], starts[row] + good[row])
            tokens[row, : good[row]] = TEXTS[row, chunk]
            tokens[row, good[row] :] = REFUSED[row, good[row] : size]
        cache = model(self.name).rollback(self.cache, jnp.asarray(starts, jnp.int32))
        logits, self.cache = SCORE(model(self.name), cache, jnp.asarray(tokens))
        np.testing.assert_array_equal(self.cache.lengths, starts + size)
        for row in range(BATCH):
            chunk = slice(starts[row], starts[row] + good[row])
            expected = expected_logits(self.name)[row, chunk]
            np.testing.assert_allclose(logits[row, : good[row]], expected, atol=1e-4, rtol=1e-5)
        self.valid = starts + good

    def feed_rest(self):
        """Feeds all that is missing, one token at a time."""
        while np.any(self.valid < LENGTH):
            # A row that is complete is fed its last token again.
            self.feed(1, (self.valid == LENGTH).astype(int), np.ones(BATCH, int))


PER_ROW = st.lists(st.integers(0, LARGEST_CHUNK), min_size=BATCH, max_size=BATCH)
CHUNKS = st.lists(
    st.tuples(st.integers(1, LARGEST_CHUNK), PER_ROW, PER_ROW), min_size=3, max_size=12
)


@pytest.mark.parametrize("name", MODELS)
@hypothesis_settings(max_examples=6, deadline=None, derandomize=True)
@given(chunks=CHUNKS)
def test_cached_logits_are_the_teacher_forced_ones_for_every_chunking(name, chunks):
    feeder = Feeder(name)
    for size, back, good in chunks:
        # All wrong tokens are rolled back, and ``back`` tokens of the text too.
        feeder.feed(size, np.asarray(back), np.asarray(good))
    feeder.feed_rest()
    np.testing.assert_array_equal(feeder.valid, LENGTH)


def test_refused_tokens_would_change_the_logits_if_they_were_left():
    # The property above can fail: without the rollback it does.
    feeder = Feeder()
    feeder.feed(2, np.zeros(BATCH, int), np.full(BATCH, 2))
    _, polluted = SCORE(model(), feeder.cache, jnp.asarray(REFUSED[:, :1]))
    logits, _ = SCORE(model(), polluted, jnp.asarray(TEXTS[:, 2:3]))
    difference = np.abs(np.asarray(logits[:, 0]) - expected_logits()[:, 2])
    assert np.all(difference.max(axis=-1) > 0.1)


def test_slots_beyond_a_rows_length_have_no_influence():
    feeder = Feeder()
    feeder.feed(3, np.zeros(BATCH, int), np.array([3, 1, 2]))
    cache = model().rollback(feeder.cache, jnp.asarray(feeder.valid, jnp.int32))
    beyond = np.arange(cache.max_length)[None, :] >= feeder.valid[:, None]
    spoilt = jnp.asarray(beyond)[:, None, :, None]
    tokens = jnp.asarray(np.stack([TEXTS[row, n : n + 2] for row, n in enumerate(feeder.valid)]))
    clean, _ = SCORE(model(), cache, tokens)
    after, _ = SCORE(model(), cache.map(lambda cached: jnp.where(spoilt, 1e4, cached)), tokens)
    np.testing.assert_array_equal(clean, after)


def test_a_rollback_touches_no_array_but_the_lengths():
    cache = empty_cache()
    lengths = jnp.array([3, 0, 2])
    rolled = cache.at(lengths)
    assert rolled.lengths is lengths
    kept = rolled.replace(lengths=cache.lengths)
    assert all(map(operator.is_, jax.tree.leaves(kept), jax.tree.leaves(cache)))


@pytest.mark.parametrize("name", ["t5"])
def test_rows_of_one_source_share_its_keys_and_values(name):
    cache, times = empty_cache(name), 2
    shared = cache.repeat_rows(times)
    assert outputs_lib.repeat_rows({"state": (cache,)}, times)["state"][0].max_length
    for layer, before in zip(shared.layers, cache.layers, strict=True):
        assert layer.cross_keys is before.cross_keys and layer.cross_values is before.cross_values
        assert layer.keys.shape[0] == layer.values.shape[0] == BATCH * times
    # Rows of one source continue with other texts, and at other lengths.
    every = jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), cache)
    tokens = jnp.asarray(np.random.default_rng(5).integers(2, 30, (BATCH * times, 3)), jnp.int32)
    for _ in range(2):
        found, shared = SCORE(model(name), shared, tokens)
        expected, every = SCORE(model(name), every, tokens)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        lengths = jnp.asarray([3, 1, 2, 3, 0, 2])
        shared, every = shared.at(lengths), every.at(lengths)
