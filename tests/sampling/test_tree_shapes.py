"""Tests of static trees: numbering, limits, and their nodes in a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.loops.tree_nodes import tree_nodes
from spec_t5x.machine.operations import XLA
from spec_t5x.sampling.tree_shapes import Tree
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

PREFILL = jax.jit(lambda target, inputs, length: target.prefill(inputs, length), static_argnums=2)
SCORE = jax.jit(lambda target, cache, tokens: target.score(cache, tokens))
SCORE_NODES = jax.jit(lambda target, cache, nodes: target.score_nodes(cache, nodes))


def test_nodes_are_numbered_level_by_level():
    tree = Tree((2, 1, 2))
    assert tree.level_sizes == (1, 2, 2, 4)
    assert tree.level_starts == (0, 1, 3, 5)
    assert (tree.num_nodes, tree.num_inner, tree.depth) == (9, 5, 3)
    np.testing.assert_array_equal(tree.depths, [0, 1, 1, 2, 2, 3, 3, 3, 3])
    np.testing.assert_array_equal(tree.parents, [0, 0, 0, 1, 2, 3, 3, 4, 4])
    np.testing.assert_array_equal(tree.first_children, [1, 3, 4, 5, 7])


def test_ancestors_are_the_path_from_the_root():
    tree = Tree((2, 1, 2))
    for node in range(tree.num_nodes):
        path, at = {node}, node
        while at:
            at = int(tree.parents[at])
            path.add(at)
        assert set(np.flatnonzero(tree.ancestors[node])) == path


@pytest.mark.parametrize(
    ("branching", "message"),
    [
        ((), "give at least one level"),
        ((0,), "give at least one level"),
        ((2, -1), "give at least one level"),
        ((16, 16), r"\(16, 16\) has 273 nodes: give at most 256"),
    ],
)
def test_impossible_trees_are_refused(branching, message):
    with pytest.raises(InputError, match=message):
        Tree(branching)


def test_every_node_is_scored_as_the_end_of_its_own_text():
    """Plain scoring of each path gives the same, for rows of unequal lengths."""
    target = tiny_t5(0)
    target = target.replace(weights=target.params, operations=XLA)
    tree, texts = Tree((2, 2)), [[0, 5, 6], [0, 4, 0]]
    lengths = jnp.array([2, 1])
    sources = jnp.array([[3, 4, 5, 1], [7, 1, 0, 0]])
    drafts = np.random.default_rng(0).integers(2, 30, (2, tree.num_nodes - 1))
    empty = PREFILL(target, sources, 14)
    *_, cache = SCORE(target, empty, jnp.array(texts)[:, :-1])
    last = jnp.take_along_axis(jnp.array(texts), lengths[:, None], axis=1)
    tokens = jnp.concatenate([last, jnp.asarray(drafts, jnp.int32)], axis=1)
    logits, _, cache = SCORE_NODES(
        target, cache, tree_nodes(tree, tokens, lengths, target.num_slots(cache))
    )
    for row in range(2):
        text = texts[row][: int(lengths[row]) + 1]
        for node in range(tree.num_nodes):
            path = [n for n in np.flatnonzero(tree.ancestors[node]) if n]
            whole = text + [int(drafts[row, n - 1]) for n in path]
            # Texts have one width: the tokens after a token have no influence on it.
            alone = jnp.tile(jnp.array(whole + [0] * (5 - len(whole))), (2, 1))
            expected, *_ = SCORE(target, empty, alone)
            np.testing.assert_allclose(logits[row, node], expected[row, len(whole) - 1], atol=1e-4)
