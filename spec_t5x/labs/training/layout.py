"""A run over many devices: how its state and the rows of its batches are sharded.

Parameters are sharded by the network's logical axes, as in inference (``models.partitioning``),
and the optimizer's state as the parameters that it belongs to.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spec_t5x.errors import InputError
from spec_t5x.labs.training.accumulation import padded_rows
from spec_t5x.models.binding import Model
from spec_t5x.models.partitioning import (
    batch_sharding,
    make_mesh,
    param_shardings,
    partitioned,
    replicated,
)
from spec_t5x.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The shardings of a run. Without a mesh, JAX's default device."""

    mesh: Mesh | None = None
    params: PyTree = None  # a ``NamedSharding`` for each that is trained

    @classmethod
    def create(
        cls,
        data_parallel: int | None,
        model_parallel: int,
        param_shardings: Callable[[Mesh], PyTree],
    ) -> "Layout":
        """The layout of so many replicas, each of so many devices.

        Args:
            data_parallel: None takes as many as there are devices for.
            model_parallel: devices that share one copy of the parameters.
            param_shardings: shardings of the trained parameters on a mesh.

        Raises:
            InputError: there are too few devices, or they cannot be shared out.
        """
        replicas = count_replicas(data_parallel, model_parallel)
        wanted = replicas * model_parallel
        if wanted == 1:
            return cls()
        mesh = make_mesh(replicas, model_parallel, jax.devices()[:wanted])
        return cls(mesh=mesh, params=param_shardings(mesh))

    def within(self) -> contextlib.AbstractContextManager:
        """A context that computes on these devices."""
        return contextlib.nullcontext() if self.mesh is None else partitioned(self.mesh)

    def frozen(self, model: Model) -> PyTree:
        """The parameters of a model that is not trained, on these devices."""
        if self.mesh is None:
            return jax.device_put(model.params)
        return jax.device_put(model.params, param_shardings(model.config, self.mesh))

    def rows(self, inputs: PyTree, parts: int = 1) -> PyTree:
        """A batch's arrays, their rows over the replicas.

        Where the rows do not divide by replicas times ``parts``, empty ones are added.
        """
        if self.mesh is None:
            return inputs
        multiple = self.mesh.shape["data"] * parts
        inputs = jax.tree.map(lambda rows: padded_rows(rows, multiple), inputs)
        return jax.device_put(inputs, batch_sharding(self.mesh))

    def initial(self, make: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
        """The ``trainer.TrainState`` that ``make(params)`` returns; never whole on one device."""
        if self.mesh is None:
            return jax.jit(make)(params)
        return jax.jit(make, out_shardings=self.state(jax.eval_shape(make, params)))(params)

    def state(self, state: PyTree) -> PyTree:
        """A ``NamedSharding`` for every array of a ``trainer.TrainState``, or its shapes.

        A subtree with the structure of the parameters belongs to them: averages of gradients
        are sharded as the parameters, and Adafactor's, which are averages over one axis, as
        the other axes. All else is replicated.
        """
        structure = jax.tree.structure(state.params)

        def is_of_params(subtree) -> bool:
            return jax.tree.structure(subtree) == structure

        def shardings(subtree):
            if not is_of_params(subtree):
                return replicated(self.mesh)
            return jax.tree.map(
                functools.partial(_as_param, mesh=self.mesh), subtree, state.params, self.params
            )

        return jax.tree.map(shardings, state, is_leaf=is_of_params)

    def step(self, train_step: Callable, state: PyTree) -> Callable:
        """The jitted step, whose new state is sharded as the old one."""
        if self.mesh is None:
            return train_step
        out_shardings = (self.state(state), replicated(self.mesh))
        return jax.jit(train_step, donate_argnums=0, out_shardings=out_shardings)


def count_replicas(data_parallel: int | None, model_parallel: int) -> int:
    """How many copies of the parameters there are, of ``model_parallel`` devices each.

    Raises:
        InputError: as ``Layout.create``.
    """
    devices = jax.device_count()
    if data_parallel is None:
        if devices % model_parallel:
            raise InputError(
                f"model_parallel is {model_parallel} and there are {devices} devices: "
                "give a divisor of their number, or data_parallel too"
            )
        return devices // model_parallel
    wanted = data_parallel * model_parallel
    if wanted > devices:
        raise InputError(
            f"data_parallel {data_parallel} times model_parallel {model_parallel} are "
            f"{wanted} devices and there are {devices}: lower one of them"
        )
    return data_parallel


def _as_param(leaf, param, sharding: NamedSharding, mesh: Mesh) -> NamedSharding:
    """The sharding of an array that belongs to a parameter."""
    if leaf.shape == param.shape:
        return sharding
    spec = [*sharding.spec, *[None] * (len(param.shape) - len(sharding.spec))]
    # Averaged over one axis: of a square matrix, over which is not known.
    averaged = {
        tuple(spec[:axis] + spec[axis + 1 :])
        for axis in range(len(param.shape))
        if leaf.shape == param.shape[:axis] + param.shape[axis + 1 :]
    }
    return (
        NamedSharding(mesh, PartitionSpec(*averaged.pop()))
        if len(averaged) == 1
        else replicated(mesh)
    )
