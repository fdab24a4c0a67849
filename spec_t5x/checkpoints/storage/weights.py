"""Weights on disk: opened by a format, read by slices on demand.

``read_params`` checks them against a configuration and brings them onto devices or into
host memory; ``read_tensors`` hands them to a format that writes them.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

# Imported for its effect: it teaches numpy bfloat16.
import ml_dtypes  # noqa: F401
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.checkpoints.storage.validate import (
    REMEDY,
    check_tensors,
    is_finite,
    refuse_not_finite,
)
from spec_t5x.models.binding import ModelConfig, expected_shapes
from spec_t5x.types import PyTree

# What is read at once, and what of it may wait to be handed on: two bounds on memory.
_THREADS = 8
_BYTES_AHEAD = 1 << 29

# Called with the bytes that are done, and with their total.
Report = Callable[[int, int], None]

# One slice for each axis.
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor in a file: its description, and a function that reads a part of it."""

    # What the checkpoint calls it; messages do, too.
    name: str
    shape: tuple[int, ...]
    # numpy's name of the stored type, such as "bfloat16".
    dtype: str
    # Called from several threads; raises ``InputError`` where the data are damaged.
    read: Callable[[Index], np.ndarray]


@dataclasses.dataclass(kw_only=True)
class Weights:
    """The weights of a model by our paths, such as ``encoder/encoder_norm/scale``."""

    # Begins every message.
    source: str
    # In the shapes that our network has.
    tensors: Mapping[str, Tensor]
    # Of formats with names and shapes of their own: all tensors of the checkpoint by these
    # names, and the shapes that a configuration asks for.
    found: Mapping[str, Tensor] | None = None
    expected: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]] = expected_shapes
    remedy: str = REMEDY

    def check(self, config: ModelConfig) -> None:
        """Compares every name, shape and type with what ``config`` asks for; reads nothing.

        Raises:
            InputError: one line with all that is missing, unexpected or otherwise wrong.
        """
        found = self.tensors if self.found is None else self.found
        check_tensors(found, self.expected(config), self.source, self.remedy)

    def read(self, path: str, index: Index) -> np.ndarray:
        """A part of a tensor, as it is stored."""
        return self.tensors[path].read(index)


def array_weights(params: PyTree, source: str) -> Weights:
    """Weights that are in memory already, as a tree of arrays."""

    def tensor(path, array):
        return Tensor(
            name=path,
            shape=np.shape(array),
            dtype=str(array.dtype),
            read=lambda index: np.asarray(array[index]),
        )

    flat = flatten_dict(params, sep="/")
    return Weights(source=source, tensors={path: tensor(path, a) for path, a in flat.items()})


def read_params(
    weights: Weights,
    config: ModelConfig,
    *,
    dtype: str,
    on_host: bool = False,
    shardings: PyTree | None = None,
) -> PyTree:
    """The checked weights as our tree of parameters.

    Args:
        weights: what to read.
        config: the model.
        dtype: what each slice is cast to, as it is read.
        on_host: numpy arrays; else arrays on JAX's default device, or as ``shardings`` has it.
        shardings: a tree like the parameters. Only the slices that devices of this process
            hold are read, each of them once, whatever the number of devices that hold it.

    Raises:
        InputError: the weights do not fit the configuration, are damaged or not finite.
    """
    weights.check(config)
    flat = None if shardings is None else flatten_dict(shardings, sep="/")
    jobs = (job for path in weights.tensors for job in _jobs(weights.tensors[path], path, flat))
    params, pieces, broken = {}, [], []
    for job, part in _read_ahead(jobs, lambda job: _read(weights, job, dtype)):
        if not is_finite(part) and weights.tensors[job.path].name not in broken:
            broken.append(weights.tensors[job.path].name)
        if flat is None:
            params[job.path] = part if on_host else jax.device_put(part)
            continue
        pieces += [jax.device_put(part, device) for device in job.devices]
        if job.is_last:
            shape, sharding = weights.tensors[job.path].shape, flat[job.path]
            params[job.path] = jax.make_array_from_single_device_arrays(
                shape, sharding, pieces, dtype=jnp.dtype(dtype)
            )
            pieces = []
    refuse_not_finite(broken, len(weights.tensors), weights.source)
    return unflatten_dict(params, sep="/")


def read_tensors(
    weights: Weights, dtype: str, report: Report | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor, whole and as ``dtype``, in order; a few are read ahead.

    Args:
        weights: what to read.
        dtype: what they are cast to.
        report: called after each tensor with the bytes done and their total.

    Raises:
        InputError: weights that are damaged or, at the end, not finite.
    """
    broken, done, total = [], 0, num_bytes(weights, dtype)
    jobs = (job for path in weights.tensors for job in _jobs(weights.tensors[path], path, None))
    for job, tensor in _read_ahead(jobs, lambda job: _read(weights, job, dtype)):
        if not is_finite(tensor):
            broken.append(weights.tensors[job.path].name)
        yield job.path, tensor
        done += tensor.nbytes
        if report:
            report(done, total)
    refuse_not_finite(broken, len(weights.tensors), weights.source)


def num_bytes(weights: Weights, dtype: str) -> int:
    """What the weights take, stored as ``dtype``."""
    sizes = (int(np.prod(info.shape)) for info in weights.tensors.values())
    return jnp.dtype(dtype).itemsize * sum(sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """One slice to read, and the devices that hold it."""

    path: str
    index: Index
    devices: tuple[jax.Device, ...] = ()
    # Whether it completes its tensor.
    is_last: bool = True
    num_bytes: int


def _jobs(info: Tensor, path: str, shardings: Mapping | None) -> list[_Job]:
    size = np.dtype(info.dtype).itemsize
    if shardings is None:
        index = tuple(slice(0, length) for length in info.shape)
        return [_Job(path=path, index=index, num_bytes=size * int(np.prod(info.shape)))]
    holders = collections.defaultdict(list)
    indices = shardings[path].addressable_devices_indices_map(info.shape)
    for device, index in indices.items():
        bounds = (part.indices(length) for part, length in zip(index, info.shape, strict=True))
        holders[tuple((start, stop) for start, stop, _ in bounds)].append(device)
    return [
        _Job(
            path=path,
            index=tuple(slice(*part) for part in bounds),
            devices=tuple(devices),
            is_last=number == len(holders),
            num_bytes=size * int(np.prod([stop - start for start, stop in bounds])),
        )
        for number, (bounds, devices) in enumerate(holders.items(), start=1)
    ]


def _read(weights: Weights, job: _Job, dtype: str) -> np.ndarray:
    return weights.read(job.path, job.index).astype(jnp.dtype(dtype), copy=False)


def _read_ahead(
    jobs: Iterable[_Job], read: Callable[[_Job], np.ndarray]
) -> Iterator[tuple[_Job, np.ndarray]]:
    """Each job with its result, in order; later ones are read meanwhile, up to a limit."""
    pending, ahead = collections.deque(), 0
    pool = ThreadPoolExecutor(_THREADS)
    try:
        for job in jobs:
            while pending and ahead + job.num_bytes > _BYTES_AHEAD:
                done, future = pending.popleft()
                ahead -= done.num_bytes
                yield done, future.result()
            pending.append((job, pool.submit(read, job)))
            ahead += job.num_bytes
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
