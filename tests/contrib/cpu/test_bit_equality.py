"""A call over many tokens on a CPU has the bits of calls over one token.

Speculative text therefore equals plain decoding's even if logits nearly tie.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.beams import cache_slots
from spec_t5x.contrib.cpu.operations import CPU
from spec_t5x.loops import outputs
from spec_t5x.loops.tree_nodes import tree_nodes
from spec_t5x.sampling.tree_shapes import Tree
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Wide enough that the order of additions matters, in products of several blocks.
WIDE = {"emb_dim": 144, "num_heads": 3, "head_dim": 24, "num_decoder_layers": 2}
TEXT, ROOM = 9, 34
prefill = jax.jit(lambda model, inputs, room: model.prefill(inputs, room), static_argnums=2)
score = jax.jit(lambda model, cache, tokens: model.score(cache, tokens))
score_nodes = jax.jit(lambda model, cache, nodes: model.score_nodes(cache, nodes))


MODELS = {
    "t5": lambda: tiny_t5(0, **WIDE, vocab_size=300, logits_via_embedding=False),
    "t5 tied": lambda: tiny_t5(0, **WIDE, vocab_size=300, logits_via_embedding=True),
    "umt5": lambda: tiny_t5(
        0, **WIDE, vocab_size=300, logits_via_embedding=False, relpos_per_layer=True
    ),
    "t5, source in int8": lambda: make("t5").with_kv("int8"),
}


@functools.cache
def make(name):
    return MODELS[name]()


def cache_of(model, batch, room=ROOM):
    """Rows of several lengths, with what refused drafts left behind them."""
    rng = np.random.default_rng(batch)
    cache = prefill(model, jnp.asarray(rng.integers(2, 30, (batch, 7)), jnp.int32), room)
    texts = jnp.asarray(rng.integers(2, 30, (batch, TEXT + 2)), jnp.int32)
    *_, cache = score(model, cache, texts)
    return model.rollback(cache, jnp.asarray(rng.integers(1, TEXT, batch), jnp.int32))


def one_by_one(model, cache, tokens):
    logits = []
    for i in range(tokens.shape[1]):
        here, _, cache = score(model, cache, tokens[:, i : i + 1])
        logits.append(here[:, 0])
    return np.stack(logits, axis=1)


def blocks(batch, new):
    return jnp.asarray(np.random.default_rng(new).integers(2, 30, (batch, new)), jnp.int32)


# 360 rows in one product, and 4.
@pytest.mark.parametrize(
    ("name", "batch", "new"),
    [
        *[("t5", 40, 9), ("t5", 1, 4), ("t5 tied", 40, 9), ("umt5", 40, 9)],
        *[("t5, source in int8", 40, 9), ("t5, source in int8", 1, 4)],
    ],
)
def test_a_block(name, batch, new):
    model = make(name)
    assert model.operations is CPU
    cache, tokens = cache_of(model, batch), blocks(batch, new)
    logits, *_ = score(model, cache, tokens)
    np.testing.assert_array_equal(logits, one_by_one(model, cache, tokens))


@pytest.mark.parametrize(("name", "decodes"), [("t5", 3), ("t5, source in int8", 2)])
def test_the_beginning_of_a_block(name, decodes):
    """The rest is neither computed nor cached; rows of an input share its source."""
    model, batch, new = make(name), 6, 6
    cache = outputs.repeat_rows(cache_of(model, batch // decodes), decodes)
    tokens = blocks(batch, new)
    score_part = jax.jit(lambda *args: model.score(*args))
    whole, *_ = score(model, cache, tokens)
    for num in (0, 1, 4, new):
        logits, _, after = score_part(cache, tokens, jnp.int32(num))
        np.testing.assert_array_equal(logits[:, :num], whole[:, :num])
        *_, expected = score(model, cache, tokens[:, :num]) if num else (None, cache)
        for ours, theirs in zip(after.layers, expected.layers, strict=True):
            np.testing.assert_array_equal(ours.keys, theirs.keys)
            np.testing.assert_array_equal(ours.values, theirs.values)


@pytest.mark.parametrize(("name", "batch"), [("t5", 30)])
def test_a_tree(name, batch):
    """Each node follows the text and the path to it; the longest rows fill the cache."""
    model, tree = make(name), Tree((2, 2, 1))
    room = TEXT - 1 + tree.num_nodes
    cache, tokens = cache_of(model, batch, room), blocks(batch, tree.num_nodes)
    assert int(cache.lengths.max()) + tree.num_nodes == room
    nodes = tree_nodes(tree, tokens, cache.lengths, model.num_slots(cache))
    logits, *_ = score_nodes(model, cache, nodes)
    for leaf in (tree.num_nodes - 1, tree.level_starts[-1]):
        path = np.flatnonzero(tree.ancestors[leaf])
        expected = one_by_one(model, cache, tokens[:, path])
        np.testing.assert_array_equal(logits[:, path], expected)


@pytest.mark.parametrize("name", ["t5"])
def test_hypotheses_of_a_beam(name):
    """Hypotheses are side by side, each after its own lineage."""
    model, batch, width, length = make(name), 6, 3, 5
    inputs = blocks(batch, 7)
    cache = prefill(model, inputs, length * width)
    alone = [prefill(model, inputs, ROOM) for _ in range(width)]
    nodes_of, settle = (
        jax.jit(functools.partial(cache_slots.nodes, width=width)),
        jax.jit(cache_slots.settle),
    )
    lineages = jnp.zeros((batch, width, length), jnp.int32)
    texts = np.asarray(blocks(batch, width * length)).reshape(batch, width, length)
    for position in range(length):
        # Hypothesis h writes to place (h + position) of its position.
        places = (np.arange(width) + position) % width
        lineages = settle(lineages, jnp.full(batch, position), jnp.asarray(places))
        nodes = nodes_of(
            jnp.asarray(texts[:, :, position]),
            jnp.full((batch, width), position),
            lineages,
        )
        logits, _, cache = score_nodes(model, cache, nodes)
        for hypothesis in range(width):
            here = jnp.asarray(texts[:, hypothesis, position : position + 1])
            expected, _, alone[hypothesis] = score(model, alone[hypothesis], here)
            np.testing.assert_array_equal(logits[:, hypothesis], expected[:, 0])


def test_a_source_without_the_padding_that_all_share():
    """The padding is not computed, and nothing attends to it."""
    model, rng = make("t5"), np.random.default_rng(0)
    sources = rng.integers(2, 30, (3, 7)).astype(np.int32)
    # Rows of several lengths, and tokens that look like padding, also in the longest rows.
    sources[1, 4:] = sources[[0, 2], 3] = 0
    tokens = blocks(3, 4)
    alone = prefill(model, jnp.asarray(sources), ROOM)
    padded = prefill(model, jnp.asarray(np.pad(sources, ((0, 0), (0, 9)))), ROOM)
    for one, other in zip(alone.layers, padded.layers, strict=True):
        there = sources[:, None, :, None] > 0
        np.testing.assert_array_equal(one.cross_keys * there, other.cross_keys[:, :, :7] * there)
        assert not other.cross_keys[:, :, 7:].any() and not other.cross_values[:, :, 7:].any()
        # The last tokens of the longest rows are not padding.
        assert np.asarray(one.cross_keys)[[0, 2], :, 6].any()
    np.testing.assert_array_equal(score(model, padded, tokens)[0], score(model, alone, tokens)[0])
