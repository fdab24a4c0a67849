"""Logical axes: names of the axes of parameters and activations, and their sharding.

The networks name axes (``embed``, ``heads``, ``batch``, …) as T5X's do, independently of any
mesh. Rules map the names to the axes of a mesh (``partitioning.RULES``). Without rules or
without a mesh (``jax.set_mesh``) nothing is constrained. T5X's partitioner enters its mesh as
``with mesh:`` instead: then XLA derives all shardings from those of the parameters.
"""

import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import flax.linen.partitioning as flax_partitioning
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.errors import ScopeParamShapeError
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from spec_t5x.models.weights import Form
from spec_t5x.types import Array

# Pairs of a logical axis and the mesh axis, or axes, over which it is sharded; None for no axis.
# An earlier pair has precedence.
Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]


def param_with_axes(
    module: nn.Module,
    name: str,
    init: Callable[..., Array],
    shape: Sequence[int],
    axes: Sequence[str],
) -> Array | Form:
    """Returns a module's parameter, by ``init`` in float32 if new, with axes in ``params_axes``.

    Flax's function of this name would shard heads unevenly if the mesh does not divide them, and
    would trace ``init`` for every existing parameter: 40 % of the time to trace a decoding loop.
    Raises ``flax.errors.ScopeParamShapeError`` if an existing parameter has another shape.
    """
    if module.has_variable("params", name) and not module.is_mutable_collection("params_axes"):
        value = module.get_variable("params", name)
        if isinstance(value, Form):
            return value
        value = meta.unbox(value)
        if jnp.shape(value) != tuple(shape):
            path = "/".join(module.path)
            raise ScopeParamShapeError(name, path, jnp.shape(value), tuple(shape))
    else:
        with flax_partitioning.axis_rules(()):
            value = flax_partitioning.param_with_axes(
                name, init, shape, jnp.float32, axes=tuple(axes), module=module
            )
    return constrain(value, axes)


def constrain(array: Array, axes: Sequence[str | None]) -> Array:
    """Returns an array sharded by the current rules for its logical axes; None is replicated."""
    rules = flax_partitioning.get_axis_rules()
    mesh = jax.sharding.get_abstract_mesh()
    if not rules or mesh.empty:
        return array
    return lax.with_sharding_constraint(array, partition_spec(array.shape, axes, rules, mesh))


def partition_spec(
    shape: Sequence[int], axes: Sequence[str | None], rules: Rules, mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Returns the ``PartitionSpec`` that rules give an array of this shape on a mesh.

    An axis whose size the mesh does not divide is replicated: each of 4 chips has all of 6 heads,
    but 96 of the 384 columns of their matrices.

    >>> partition_spec((6, 32), ("heads", "relpos_buckets"), RULES, mesh)  # model = 4
    PartitionSpec(None, None)
    """
    sized = zip(flax_partitioning.logical_to_mesh_axes(tuple(axes), rules), shape, strict=True)
    return PartitionSpec(*(axis if n % extent(axis, mesh) == 0 else None for axis, n in sized))


def extent(names: str | tuple[str, ...] | None, mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of devices along one mesh axis or several; 1 for None."""
    names = (names,) if isinstance(names, str) else names or ()
    return math.prod(mesh.shape[name] for name in names)
