"""A pair spread over the devices of this machine: replicas, or one model on several."""

import contextlib
import dataclasses

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from spec_t5x.errors import InputError
from spec_t5x.generation import Batch, Generator
from spec_t5x.models.binding import Model, ModelConfig
from spec_t5x.models.partitioning import (
    make_mesh,
    param_shardings,
    partitioned,
    replicated,
    shard_batch,
)
from spec_t5x.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Which devices decode together. None is JAX's default device alone."""

    mesh: Mesh | None = None

    @classmethod
    def create(cls, model_parallel: int, batch_size: int) -> "Placement":
        """All devices of this machine, ``model_parallel`` of them to each model.

        Raises:
          InputError: they cannot be shared out like this, or the batch cannot.
        """
        devices = jax.local_devices()
        if len(devices) == 1 and model_parallel == 1:
            return cls()
        if len(devices) % model_parallel:
            raise InputError(
                f"model_parallel is {model_parallel} and there are {len(devices)} devices: give "
                "a divisor of their number"
            )
        mesh = make_mesh(model=model_parallel, devices=devices)
        if batch_size % mesh.shape["data"]:
            raise InputError(
                f"batch_size is {batch_size} and {mesh.shape['data']} models decode at once: "
                f"give a multiple of {mesh.shape['data']}"
            )
        return cls(mesh=mesh)

    @property
    def shape(self) -> list[int]:
        """Models at work at once, and devices of each."""
        return [1, 1] if self.mesh is None else [self.mesh.shape["data"], self.mesh.shape["model"]]

    def within(self) -> contextlib.AbstractContextManager:
        """What is decoded within it is decoded on these devices."""
        return contextlib.nullcontext() if self.mesh is None else partitioned(self.mesh)

    def target(self, config: ModelConfig) -> PyTree:
        """Where the parameters of a target are to lie: it is never whole on one device."""
        return param_shardings(config, self.mesh)

    def generator(self, generator: Generator) -> Generator:
        """The pair with its parameters on these devices."""
        if self.mesh is None:
            return generator
        placer = _Placer(self.mesh)
        return dataclasses.replace(
            generator, target=placer.place(generator.target), draft=placer.place(generator.draft)
        )

    def batch(self, batch: Batch) -> Batch:
        """A batch with its rows on these devices."""
        if self.mesh is None:
            return batch
        tokens, keys, steps = shard_batch(
            (batch.tokens, batch.keys, batch.max_decode_steps), self.mesh
        )
        return dataclasses.replace(batch, tokens=tokens, keys=keys, max_decode_steps=steps)


class _Placer:
    """Places trees of parameters. What two of them share is placed once."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._placed: dict[int, jax.Array] = {}
        # As long as one is held, its ``id`` is no other's.
        self._seen: list[jax.Array] = []

    def place(self, tree: PyTree) -> PyTree:
        """The tree with models sharded by the rules, and all else on every device."""
        return jax.tree.map(
            lambda node: self._model(node) if _is_model(node) else self._leaf(node),
            tree,
            is_leaf=_is_model,
        )

    def _model(self, model: Model) -> Model:
        # Of a whole model: a draft may do without some of its parameters, and have others.
        shardings = flatten_dict(param_shardings(model.config, self._mesh))
        params = {
            path: self._leaf(leaf, shardings[path])
            for path, leaf in flatten_dict(model.params).items()
        }
        rest = jax.tree.map(self._leaf, model.replace(params={}))
        # The kernels are one device's: on several each matrix would be gathered for them.
        return rest.replace(params=unflatten_dict(params), kernels=False)

    def _leaf(self, leaf: jax.Array, sharding=None) -> jax.Array:
        if id(leaf) not in self._placed:
            self._seen.append(leaf)
            self._placed[id(leaf)] = jax.device_put(leaf, sharding or replicated(self._mesh))
        return self._placed[id(leaf)]


def _is_model(node) -> bool:
    return isinstance(node, Model)
