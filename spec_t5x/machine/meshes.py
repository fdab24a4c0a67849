"""Constraints on the sharding of a batch's rows on a mesh.

XLA shards unconstrained arrays differently from program to program. Flax's rule for "batch" gives
the mesh axis of rows. Without a mesh (``jax.set_mesh``) or rules the functions have no effect.
"""

import flax.linen.partitioning as flax_partitioning
import jax
from jax import lax
from jax.sharding import PartitionSpec

from spec_t5x.types import Array, PyTree


def spread_rows(tree: PyTree) -> PyTree:
    """Shards the first axis (batch) of each array; replicates it if the mesh axis does not fit."""
    return _with_rows(tree, dict(flax_partitioning.get_axis_rules()).get("batch"))


def gather_rows(tree: PyTree) -> PyTree:
    """Replicates the first axis of each array, the batch, on all devices of the mesh."""
    return _with_rows(tree, None)


def _with_rows(tree: PyTree, axis: str | None) -> PyTree:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not flax_partitioning.get_axis_rules():
        return tree

    def constrain(leaf: Array) -> Array:
        first = axis if axis and leaf.shape[0] % mesh.shape[axis] == 0 else None
        others = [PartitionSpec.UNCONSTRAINED] * (leaf.ndim - 1)
        return lax.with_sharding_constraint(leaf, PartitionSpec(first, *others))

    return jax.tree.map(constrain, tree)
