"""Trees of drafts as ``Nodes`` of one cached call, and the rules of decoding at their nodes."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from spec_t5x.interfaces import Context, Nodes
from spec_t5x.sampling.distributions import write_rows
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Float, Int


def tree_nodes(
    tree: Tree,
    tokens: Int[Array, "batch nodes"],
    lengths: Int[Array, "batch"],
    num_slots: int,
    first: int = 0,
) -> Nodes:
    """Returns the nodes ``first, first + 1, …`` of a tree whose root is at position ``lengths``.

    The cache has ``num_slots`` slots for each row: node n is in slot ``lengths + n``, and the
    row's text in the slots below. ``tokens`` are those of the returned nodes alone.
    """
    numbers = first + jnp.arange(tokens.shape[1])
    slots = jnp.arange(num_slots)
    # The number of the node that each slot holds; outside of the tree it is clipped below.
    nodes = slots[None, :] - lengths[:, None]
    is_node = (nodes >= 0) & (nodes < tree.num_nodes)
    nodes = jnp.clip(nodes, 0, tree.num_nodes - 1)
    on_path = jnp.asarray(tree.ancestors)[numbers][:, nodes].transpose(1, 0, 2)
    is_text = slots[None, :] < lengths[:, None]
    depths = jnp.asarray(tree.depths)
    return Nodes(
        tokens=tokens,
        positions=lengths[:, None] + depths[numbers][None, :],
        slots=lengths[:, None] + numbers[None, :],
        slot_positions=jnp.where(is_node, lengths[:, None] + depths[nodes], slots[None, :]),
        visible=is_text[:, None, :] | (is_node[:, None, :] & on_path),
        consecutive=True,
    )


def ruled_nodes(
    context: Context,
    logits: Float[Array, "batch nodes vocab"],
    tree: Tree,
    tokens: Sequence[Int[Array, "batch _"]],
    first: int = 0,
) -> Float[Array, "batch nodes vocab"]:
    """Applies the rules of decoding to the logits after nodes ``first, first + 1, …`` of a tree.

    The arrays of ``tokens``, joined, are the tokens of nodes 1, 2, …, at least of all on the paths
    to these nodes.
    """
    if context.settings.rules is None:
        return logits
    nodes = first + np.arange(logits.shape[1])
    # The node at each depth of the paths, from depth 1; of shorter ones the last repeats.
    paths = tree.paths[nodes][:, 1:]
    drafted = jnp.concatenate([context.last_tokens[:, None], *tokens], axis=1)[:, paths]
    texts = jnp.repeat(context.sequences[:, None], len(nodes), axis=1)
    texts = write_rows(texts, drafted, context.lengths + 1, axis=2)
    return context.ruled_texts(logits, texts, jnp.asarray(tree.depths[nodes]))
