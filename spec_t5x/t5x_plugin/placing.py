"""Sharding of a draft's parameters on T5X's mesh.

T5X refuses an array axis whose size the mesh axis does not divide, for example the 6 heads of
``t5_1_1_small`` on 4 devices. A draft is small and follows the package's rule
(``models.logical_axes.partition_spec``): its axis is not sharded, so that each device holds the
whole of it. A target is sharded as T5X does.
"""

from absl import logging
from flax.core import unfreeze
from flax.linen.partitioning import AxisMetadata, get_axis_names, logical_to_mesh_axes
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from t5x import partitioning

from spec_t5x.checkpoints.storage.tensors import listed
from spec_t5x.models.logical_axes import Rules, partition_spec
from spec_t5x.types import PyTree


def with_divided_axes(variables: PyTree, partitioner: partitioning.PjitPartitioner) -> PyTree:
    """Returns variables in which axes that the mesh does not divide have no name; logs these.

    ``variables`` are the draft's ``params``, arrays or shapes, and ``params_axes``.
    """
    mesh, rules = partitioner.mesh, partitioner.logical_axis_rules
    declared = flatten_dict(unfreeze(get_axis_names(variables["params_axes"])))
    axes, whole = {}, []
    for path, leaf in flatten_dict(unfreeze(variables["params"])).items():
        names = tuple(declared[path])
        divided = _divided(leaf.shape, names, rules, mesh)
        axes[(*path[:-1], f"{path[-1]}_axes")] = AxisMetadata(divided)
        if divided != names:
            whole.append("/".join(path))
    if whole:
        logging.info(
            f"The mesh {dict(mesh.shape)} does not divide {len(whole)} of the draft's {len(axes)} "
            f"parameters ({listed(sorted(whole))}): each device holds them whole along that axis"
        )
    return {**variables, "params_axes": unflatten_dict(axes)}


def _divided(
    shape: tuple[int, ...], names: tuple[str | None, ...], rules: Rules, mesh: Mesh
) -> tuple[str | None, ...]:
    """Returns the names of the axes that the mesh divides, with None in place of the others."""
    while True:
        wanted = logical_to_mesh_axes(names, rules)
        found = partition_spec(shape, names, rules, mesh)
        if found == wanted:
            return names
        # A mesh axis that became free may fit another name, so the rules are applied again.
        names = tuple(
            name if axis == kept else None
            for name, axis, kept in zip(names, wanted, found, strict=True)
        )
