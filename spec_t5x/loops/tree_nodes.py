"""The nodes of a tree, or of some of its levels, as new tokens of a cache."""

import jax.numpy as jnp

from spec_t5x.interfaces import Nodes
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Int


def tree_nodes(
    tree: Tree,
    tokens: Int[Array, "batch nodes"],
    lengths: Int[Array, "batch"],
    num_slots: int,
    first: int = 0,
) -> Nodes:
    """The nodes ``first, first + 1, …`` of a tree whose root is at position ``lengths``.

    Node n is kept in slot ``lengths + n``; the slots below hold the row's text.

    Args:
      tree: the tree.
      tokens: one for each of the nodes.
      lengths: position of each row's last token, the root.
      num_slots: how many the cache has.
      first: number of the first node.
    """
    numbers = first + jnp.arange(tokens.shape[1])
    slots = jnp.arange(num_slots)
    # The node that each slot holds, if it is one.
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
