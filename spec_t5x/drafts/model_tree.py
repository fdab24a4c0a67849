"""Drafting a tree with a model, level by level."""

import jax.numpy as jnp

from spec_t5x.interfaces import Cache, Context, NodeTarget, TreeProposal
from spec_t5x.loops.tree_nodes import tree_nodes
from spec_t5x.sampling.distributions import Sampling, standardize
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Float32


def draft_tree(
    model: NodeTarget,
    cache: Cache,
    logits: Float32[Array, "batch vocab"],
    context: Context,
    settings: Sampling,
    tree: Tree,
) -> tuple[TreeProposal, Cache]:
    """A token for each node: the children of a node are drawn without replacement.

    One call of the model for each level but the last. The cache keeps its lengths; its
    slots from the root's on hold the nodes.

    Args:
      model: what drafts.
      cache: holds the rows' texts, their last tokens included.
      logits: the model's, after the last tokens.
      context: the rows.
      settings: how the draft samples.
      tree: the shape.
    """
    level_logits, draws = logits[:, None], context.draws
    tokens, all_probs = [], []
    for depth, branching in enumerate(tree.branching):
        probs = standardize(level_logits, settings)
        children = []
        for i in range(tree.level_sizes[depth]):
            of_node, draws = draws.next_distinct(
                probs[:, i], level_logits[:, i], branching, settings
            )
            children.append(of_node)
        tokens.append(jnp.concatenate(children, axis=1))
        all_probs.append(probs)
        if depth + 1 < tree.depth:
            first = tree.level_starts[depth + 1]
            slots = model.num_slots(cache)
            nodes = tree_nodes(tree, tokens[-1], context.lengths, slots, first)
            level_logits, cache = model.score_nodes(cache, nodes)
    return TreeProposal(
        tokens=jnp.concatenate(tokens, axis=1),
        probs=None if settings.greedy else jnp.concatenate(all_probs, axis=1),
        depths=jnp.full(tokens[0].shape[0], tree.depth, jnp.int32),
    ), cache
