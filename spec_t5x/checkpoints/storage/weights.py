"""Weights where they lie, read when they are asked for, and only what is asked for.

Each format has a ``Weights`` of its own. ``read_params`` checks one against a
configuration and brings it onto devices or into host memory, slice by slice.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

# Imported for its effect: it teaches numpy bfloat16.
import ml_dtypes  # noqa: F401
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.checkpoints.storage.abstract import expected_shapes
from spec_t5x.checkpoints.storage.validate import check_tensors, is_finite, refuse_not_finite
from spec_t5x.models.binding import ModelConfig
from spec_t5x.types import PyTree

# What is read at once, and what of it may wait to be handed on: two bounds on memory.
_THREADS = 8
_BYTES_AHEAD = 1 << 29

# Told how many bytes are done, and of how many.
Report = Callable[[int, int], None]

# One slice for each axis.
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    # numpy's name of the stored type, such as "bfloat16".
    dtype: str
    # What the checkpoint calls it; messages do, too.
    name: str


@runtime_checkable
class Weights(Protocol):
    """The weights of a model by our paths, such as ``encoder/encoder_norm/scale``."""

    # Begins every message.
    source: str

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All there are, with the shapes that our network has them in."""

    def check(self, config: ModelConfig) -> None:
        """Compares every name, shape and type with what ``config`` asks for; reads nothing.

        Raises:
            InputError: one line with all that is missing, unexpected or otherwise wrong.
        """

    def read(self, path: str, index: Index) -> np.ndarray:
        """A part of a tensor, as it is stored. Called from several threads.

        Raises:
            InputError: the data are damaged.
        """


def check_found(
    found: Mapping[str, TensorInfo],
    expected: Mapping[str, tuple[int, ...]],
    source: str,
    **remedy: str,
) -> None:
    """``validate.check_tensors`` of what was found."""
    shapes = {path: info.shape for path, info in found.items()}
    dtypes = {path: info.dtype for path, info in found.items()}
    check_tensors(shapes, dtypes, expected, source, **remedy)


class ArrayWeights:
    """Weights that are in memory already, as a tree of arrays."""

    def __init__(self, params: PyTree, source: str):
        self.source = source
        self._arrays = flatten_dict(params, sep="/")

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {
            path: TensorInfo(shape=np.shape(array), dtype=str(array.dtype), name=path)
            for path, array in self._arrays.items()
        }

    def check(self, config: ModelConfig) -> None:
        check_found(self.tensors, expected_shapes(config), self.source)

    def read(self, path: str, index: Index) -> np.ndarray:
        return np.asarray(self._arrays[path][index])


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
        weights: where they lie.
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
        weights: where they lie.
        dtype: what they are cast to.
        report: told how many bytes were handed out and done with, and of how many.

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


def _jobs(info: TensorInfo, path: str, shardings: Mapping | None) -> list[_Job]:
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
