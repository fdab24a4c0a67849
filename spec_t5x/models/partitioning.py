"""Partitioning: meshes, rules and shardings of parameters and batches.

A mesh has two axes, as in T5X: ``data`` for the rows of a batch, ``model`` for each matrix.
The rules are those of T5X's simplest layout (activations and parameters sharded in one
dimension), so that a checkpoint is sharded as by T5X.

    mesh = make_mesh(model=4)
    params = jax.device_put(params, param_shardings(config, mesh))
    with partitioned(mesh):
        decoded = speculative_decode(T5Model.create(params, config), draft, ...)
"""

import contextlib
from collections.abc import Iterator, Sequence

import flax.linen.partitioning as flax_partitioning
import jax
import numpy as np
from flax.core import unfreeze
from jax.experimental import multihost_utils
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spec_t5x.errors import InputError
from spec_t5x.machine import compilation_cache
from spec_t5x.models.binding import abstract_variables
from spec_t5x.models.logical_axes import partition_spec
from spec_t5x.models.t5 import NetworkConfig
from spec_t5x.types import PyTree

# Pairs of a logical axis and the mesh axis that shards it, None for none; see ``logical_axes``.
RULES = (
    ("batch", "data"),
    *((axis, "model") for axis in ("vocab", "mlp", "heads", "joined_kv")),
    *((axis, None) for axis in ("embed", "kv", "length", "relpos_buckets", "draft_heads")),
)


def make_mesh(
    data: int | None = None, model: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Makes a mesh of ``data`` replicas of ``model`` devices, which are close together.

    Each replica has a part of the batch; by default there are as many as fit, of all devices.

    Raises:
      InputError: a size below 1, a product that is not the number of devices, or TPU chips whose
        grid has no such mesh.
    """
    devices = jax.devices() if devices is None else list(devices)
    if model < 1 or (data is not None and data < 1):
        raise InputError(f"a mesh of {data} by {model} devices: give at least 1 for each axis")
    if data is None:
        data = max(1, len(devices) // model)
    if data * model != len(devices):
        raise InputError(
            f"a mesh of {data} by {model} needs {data * model} devices and there are "
            f"{len(devices)}: choose axes whose product is {len(devices)}"
        )
    try:
        # ``jax.make_mesh`` splits an axis of chips, as 4 x 4 into 8 x 2, on some TPUs alone.
        placed = create_device_mesh((data, model), devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError) as error:
        what = f"a mesh of {data} by {model} does not fit the places of the {len(devices)} chips"
        raise InputError(f"{what}: choose axes that divide each of their rows") from error
    return Mesh(placed, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@contextlib.contextmanager
def partitioned(mesh: Mesh) -> Iterator[Mesh]:
    """Sets JAX's mesh, and applies ``RULES`` to all that is traced in this context.

    The context must not be entered inside a compiled function. Programs of several CPU devices
    are compiled in each process again.
    """
    # XLA's CPU runtime orders a program's collectives by a resource that all of them use. A program
    # from the cache has another resource for each loop and branch (XLA's
    # ``ThunkSequenceSerDesProtobuf``, as of jaxlib 0.10.2): devices may then begin with different
    # collectives, one in a loop and one beside it, and wait for each other.
    several = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    cache = compilation_cache.unused() if several else contextlib.nullcontext()
    with cache, jax.set_mesh(mesh), flax_partitioning.axis_rules(RULES):
        yield mesh


def param_shardings(config: NetworkConfig, mesh: Mesh) -> PyTree:
    """Returns the ``NamedSharding`` of each parameter of a network, without allocating any."""
    variables = abstract_variables(config)
    return declared_shardings(variables["params"], variables["params_axes"], mesh)


def gathered(leaf: jax.Array | np.ndarray) -> np.ndarray:
    """Returns the whole of an array on the host, gathered from all processes if it is sharded."""
    is_sharded = isinstance(leaf, jax.Array) and not leaf.is_fully_replicated
    if is_sharded and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def declared_shardings(params: PyTree, params_axes: PyTree, mesh: Mesh) -> PyTree:
    """Returns the ``NamedSharding`` of each parameter of any network that declares its axes.

    ``params`` (arrays or shapes) and ``params_axes`` are collections of ``Module.init``'s result.
    """
    axes = unfreeze(flax_partitioning.get_axis_names(params_axes))

    def sharding(leaf, names):
        return NamedSharding(mesh, partition_spec(leaf.shape, tuple(names), RULES, mesh))

    return jax.tree.map(sharding, unfreeze(params), axes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that spreads an array's rows over ``data``, which must divide them."""
    return NamedSharding(mesh, PartitionSpec("data"))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that keeps an array whole on every device."""
    return NamedSharding(mesh, PartitionSpec())
