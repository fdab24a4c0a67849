"""The shardings of a run's state and batches over many devices.

Parameters are sharded by the network's logical axes, as in inference (``models.partitioning``).
The optimizer's averages of gradients are sharded as their parameters, a batch by its rows.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from spec_t5x.checkpoints.storage.stored_model import Shardings
from spec_t5x.errors import InputError
from spec_t5x.labs.training.accumulation import padded_rows
from spec_t5x.models.cached_model import CachedModel
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
    """The mesh and shardings of a run; if the mesh is None, all is on JAX's default device."""

    mesh: Mesh | None = None
    params: PyTree = None  # a ``NamedSharding`` for each trained parameter

    @classmethod
    def create(
        cls,
        data_parallel: int | None,
        model_parallel: int,
        of_trained: Callable[[Mesh], PyTree] = lambda mesh: None,
    ) -> "Layout":
        """Makes the layout of ``count_replicas`` replicas of ``model_parallel`` devices each.

        ``of_trained`` maps the mesh to a ``NamedSharding`` for each trained parameter.
        """
        replicas = count_replicas(data_parallel, model_parallel)
        wanted = replicas * model_parallel
        if wanted == 1:
            return cls()
        mesh = make_mesh(replicas, model_parallel, jax.devices()[:wanted])
        return cls(mesh=mesh, params=of_trained(mesh))

    def within(self) -> contextlib.AbstractContextManager:
        """Returns a context in which jitted functions are partitioned over the mesh, if any."""
        return contextlib.nullcontext() if self.mesh is None else partitioned(self.mesh)

    @property
    def shardings(self) -> Shardings | None:
        """Function from a configuration to its parameters' shardings; None on one device."""
        return self.mesh and functools.partial(param_shardings, mesh=self.mesh)

    def frozen(self, model: CachedModel) -> PyTree:
        """Returns the parameters of a model that is not trained, sharded over the mesh."""
        shardings = self.shardings and self.shardings(model.config)
        return jax.device_put(model.params, shardings)

    def rows(self, inputs: PyTree, parts: int = 1) -> PyTree:
        """Puts a batch's arrays, [batch, length], on the mesh, with the rows split over replicas.

        Rows of padding are appended, up to a multiple of replicas times ``parts``.
        """
        if self.mesh is None:
            return inputs
        multiple = self.mesh.shape["data"] * parts
        inputs = jax.tree.map(lambda rows: padded_rows(rows, multiple), inputs)
        return jax.device_put(inputs, batch_sharding(self.mesh))

    def initial(self, make: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
        """Computes ``make(params)``, a ``TrainState``, sharded: no device holds it whole."""
        if self.mesh is None:
            return jax.jit(make)(params)
        return jax.jit(make, out_shardings=self.state(jax.eval_shape(make, params)))(params)

    def state(self, state: PyTree) -> PyTree:
        """Returns a ``NamedSharding`` for each array of ``state``, a ``TrainState`` or its shapes.

        In a subtree with the parameters' structure, an array of the same shape as its parameter is
        sharded as the parameter. All other arrays are replicated, for example Adafactor's averages
        over one axis.
        """
        structure, everywhere = jax.tree.structure(state.params), replicated(self.mesh)

        def is_of_params(subtree) -> bool:
            return jax.tree.structure(subtree) == structure

        def shardings(subtree):
            if not is_of_params(subtree):
                return everywhere
            return jax.tree.map(
                lambda leaf, param, sharding: sharding if leaf.shape == param.shape else everywhere,
                *(subtree, state.params, self.params),
            )

        return jax.tree.map(shardings, state, is_leaf=is_of_params)

    def step(self, train_step: Callable, state: PyTree) -> Callable:
        """Returns ``train_step``, which on a mesh is jitted to shard its result as ``state``."""
        if self.mesh is None:
            return train_step
        out_shardings = (self.state(state), replicated(self.mesh))
        return jax.jit(train_step, donate_argnums=0, out_shardings=out_shardings)


def count_replicas(data_parallel: int | None, model_parallel: int) -> int:
    """Returns the number of replicas of the parameters, of ``model_parallel`` devices each.

    If ``data_parallel`` is None, there are as many replicas as the devices allow.

    Raises:
        InputError: there are too few devices, not a multiple of ``model_parallel``, or those of
            several processes.
    """
    if (processes := jax.process_count()) > 1:
        raise InputError(
            f"the devices are of {processes} processes and a training has one: train on one host, "
            "or by t5x.train (docs/t5x.md)"
        )
    devices = jax.device_count()
    if data_parallel is None:
        if devices % model_parallel:
            raise InputError(
                f"model_parallel is {model_parallel} and does not divide the number of devices, "
                f"{devices}: give a divisor, or data_parallel too"
            )
        return devices // model_parallel
    wanted = data_parallel * model_parallel
    if wanted > devices:
        raise InputError(
            f"data_parallel {data_parallel} times model_parallel {model_parallel} is {wanted} and "
            f"the number of devices {devices}: lower one of them"
        )
    return data_parallel
