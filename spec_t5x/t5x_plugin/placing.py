"""A draft's parameters on T5X's mesh: what the mesh does not divide is whole on every device.

T5X shards each parameter by its logical axes and refuses an axis that the mesh does not divide,
such as the 6 heads of ``t5_1_1_small`` on 4 devices. A target stays as T5X shards it. A draft is
small and follows the package's own rule (``models.logical_axes.partition_spec``).
"""

import math

from absl import logging
from flax.core import unfreeze
from flax.linen.partitioning import AxisMetadata, get_axis_names, logical_to_mesh_axes
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from t5x import partitioning

from spec_t5x.checkpoints.storage.tensors import listed
from spec_t5x.models.logical_axes import Rules, extent, partition_spec
from spec_t5x.types import PyTree


def with_divided_axes(
    variables: PyTree, partitioner: partitioning.PjitPartitioner, position: int
) -> PyTree:
    """Takes the names of the axes that the mesh does not divide out of ``params_axes``.

    A line in the log says what that costs.

    Args:
      variables: the draft's ``params``, arrays or shapes, and ``params_axes``.
      partitioner: the launch's, with a mesh and rules of logical axes.
      position: of the draft's caches, in bytes for each row. Where the heads are whole, XLA keeps
        some of the caches whole, too.
    """
    mesh, rules = partitioner.mesh, partitioner.logical_axis_rules
    declared = flatten_dict(unfreeze(get_axis_names(variables["params_axes"])))
    kept, costs = {}, {}
    for path, leaf in flatten_dict(unfreeze(variables["params"])).items():
        names = tuple(declared[path])
        divided = _divided(leaf.shape, names, rules, mesh)
        kept[(*path[:-1], f"{path[-1]}_axes")] = AxisMetadata(divided)
        if divided != names:
            held = NamedSharding(mesh, logical_to_mesh_axes(divided, rules)).shard_shape(leaf.shape)
            spread = math.prod(extent(axis, mesh) for axis in logical_to_mesh_axes(names, rules))
            size = leaf.dtype.itemsize
            costs["/".join(path)] = (math.prod(held) - leaf.size / spread) * size
    if costs:
        logging.info(
            "The mesh %s does not divide %d of the draft's %d parameters (%s): each device holds "
            "them whole along such an axis, %.3g KB more than its share, and up to all of the "
            "caches, %.3g KB for each token of each row",
            dict(mesh.shape),
            len(costs),
            len(kept),
            listed(sorted(costs)),
            sum(costs.values()) / 1e3,
            position / 1e3,
        )
    return {**variables, "params_axes": unflatten_dict(kept)}


def _divided(
    shape: tuple[int, ...], names: tuple[str | None, ...], rules: Rules, mesh: Mesh
) -> tuple[str | None, ...]:
    """Keeps the names of the axes that the mesh divides, with None in place of the others."""
    while True:
        wanted = logical_to_mesh_axes(names, rules)
        found = partition_spec(shape, names, rules, mesh)
        if found == wanted:
            return names
        # The rules may have another use for what became free.
        names = tuple(
            name if axis == kept else None
            for name, axis, kept in zip(names, wanted, found, strict=True)
        )
