"""Placement of target and draft on this machine's devices: data and model parallelism."""

import contextlib
import dataclasses

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from spec_t5x.errors import InputError
from spec_t5x.generation import Batch, Generator
from spec_t5x.models import partitioning, weights
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.t5 import NetworkConfig
from spec_t5x.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Devices that decode together: those of ``mesh`` or, if it is None, JAX's default device."""

    mesh: Mesh | None = None

    @classmethod
    def create(cls, model_parallel: int, batch_size: int) -> "Placement":
        """Places a copy of the models on every ``model_parallel`` devices; raises if it cannot."""
        devices = jax.local_devices()
        if len(devices) == 1 and model_parallel == 1:
            return cls()
        if len(devices) % model_parallel:
            raise InputError(
                f"model_parallel is {model_parallel} and does not divide the number of devices, "
                f"{len(devices)}: give a divisor"
            )
        mesh = partitioning.make_mesh(model=model_parallel, devices=devices)
        if batch_size % mesh.shape["data"]:
            raise InputError(
                f"batch_size is {batch_size} and {mesh.shape['data']} copies of the model run: "
                f"give a multiple of {mesh.shape['data']}"
            )
        return cls(mesh=mesh)

    @property
    def shape(self) -> list[int]:
        """Number of copies of the models, and of devices for each copy."""
        return [1, 1] if self.mesh is None else [self.mesh.shape["data"], self.mesh.shape["model"]]

    def within(self) -> contextlib.AbstractContextManager:
        """Returns a context manager, within which computations run on these devices."""
        if self.mesh is None:
            return contextlib.nullcontext()
        return partitioning.partitioned(self.mesh)

    def params(self, config: NetworkConfig) -> PyTree:
        """Returns the shardings, on the mesh, with which a model's parameters are to be loaded."""
        return partitioning.param_shardings(config, self.mesh)

    def generator(self, generator: Generator) -> Generator:
        """Returns the generator with sharded models; other arrays are replicated on the devices."""
        if self.mesh is None:
            return generator
        # Arrays that target and draft share are placed once. The old array is kept beside the new,
        # so that no other array gets its ``id``.
        placed: dict[int, tuple[jax.Array, jax.Array]] = {}
        everywhere = partitioning.replicated(self.mesh)

        def place(leaf: jax.Array, sharding=None) -> jax.Array:
            if id(leaf) not in placed:
                placed[id(leaf)] = leaf, jax.device_put(leaf, sharding or everywhere)
            return placed[id(leaf)][1]

        def place_node(node: CachedModel | jax.Array) -> PyTree:
            if not isinstance(node, CachedModel):
                return place(node)
            # A draft may lack parameters of the whole model, or have others.
            shardings = flatten_dict(partitioning.param_shardings(node.config, self.mesh))
            params = {
                path: weights.placed(leaf, shardings.get(path, everywhere), place)
                for path, leaf in flatten_dict(node.weights).items()
            }
            rest = jax.tree.map(place, node.replace(weights={}))
            return rest.replace(weights=unflatten_dict(params))

        models = generator.target, generator.draft
        target, draft = jax.tree.map(
            place_node, models, is_leaf=lambda node: isinstance(node, CachedModel)
        )
        return dataclasses.replace(generator, target=target, draft=draft)

    def batch(self, batch: Batch) -> Batch:
        """Returns the batch with its rows divided among the copies of the models."""
        if self.mesh is None:
            return batch
        rows = batch.tokens, batch.keys, batch.max_decode_steps
        tokens, keys, steps = jax.device_put(rows, partitioning.batch_sharding(self.mesh))
        return dataclasses.replace(batch, tokens=tokens, keys=keys, max_decode_steps=steps)
