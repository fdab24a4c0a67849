"""Weights on disk: opened by a format, read by slices on demand.

``read_params`` brings them onto devices or into host memory; ``read_tensors`` hands them to a
format that writes them.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

# Imported for its effect: it teaches numpy bfloat16.
import ml_dtypes  # noqa: F401
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.checkpoints.storage.validate import is_finite, refuse_not_finite
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


# The weights of a model by our paths, such as ``encoder/encoder_norm/scale``, in the shapes
# that our network has; what else a checkpoint holds, by its own names.
Tensors = Mapping[str, Tensor]


def array_tensors(params: PyTree) -> dict[str, Tensor]:
    """Weights that are in memory already, as a tree of arrays."""

    def tensor(path, array):
        return Tensor(
            name=path,
            shape=np.shape(array),
            dtype=str(array.dtype),
            read=lambda index: np.asarray(array[index]),
        )

    flat = flatten_dict(params, sep="/")
    return {path: tensor(path, array) for path, array in flat.items()}


def read_params(
    tensors: Tensors,
    source: str,
    *,
    dtype: str,
    on_host: bool = False,
    shardings: PyTree | None = None,
) -> PyTree:
    """The weights as our tree of parameters.

    Args:
        tensors: what to read.
        source: begins every message.
        dtype: what each slice is cast to, as it is read.
        on_host: numpy arrays; else arrays on JAX's default device, or as ``shardings`` has it.
        shardings: a tree like the parameters. Only the slices that devices of this process
            hold are read, each of them once, whatever the number of devices that hold it.

    Raises:
        InputError: weights that are damaged or not finite.
    """
    flat = None if shardings is None else flatten_dict(shardings, sep="/")
    params, pieces = {}, []
    for job, part in _finite_parts(tensors, source, dtype, flat):
        if flat is None:
            params[job.path] = part if on_host else jax.device_put(part)
            continue
        pieces += [jax.device_put(part, device) for device in job.devices]
        if job.is_last:
            params[job.path] = jax.make_array_from_single_device_arrays(
                tensors[job.path].shape, flat[job.path], pieces, dtype=jnp.dtype(dtype)
            )
            pieces = []
    return unflatten_dict(params, sep="/")


def read_tensors(
    tensors: Tensors, source: str, dtype: str, report: Report | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor, whole and as ``dtype``, in order; a few are read ahead.

    Raises:
        InputError: weights that are damaged or, at the end, not finite.
    """
    sizes = (math.prod(tensor.shape) for tensor in tensors.values())
    done, total = 0, jnp.dtype(dtype).itemsize * sum(sizes)
    for job, tensor in _finite_parts(tensors, source, dtype):
        yield job.path, tensor
        done += tensor.nbytes
        if report:
            report(done, total)


def _finite_parts(
    tensors: Tensors, source: str, dtype: str, shardings: Mapping | None = None
) -> Iterator[tuple["_Job", np.ndarray]]:
    """What is to be read, in order; refuses at the end what is not finite."""
    # A dictionary: each name once, in order.
    broken = {}
    jobs = (job for path, tensor in tensors.items() for job in _jobs(tensor, path, shardings))
    for job, part in _read_ahead(jobs, lambda job: _read(tensors[job.path], job.index, dtype)):
        if not is_finite(part):
            broken[tensors[job.path].name] = True
        yield job, part
    refuse_not_finite(list(broken), len(tensors), source)


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
        return [_Job(path=path, index=index, num_bytes=size * math.prod(info.shape))]
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
            num_bytes=size * math.prod(stop - start for start, stop in bounds),
        )
        for number, (bounds, devices) in enumerate(holders.items(), start=1)
    ]


def _read(tensor: Tensor, index: Index, dtype: str) -> np.ndarray:
    return tensor.read(index).astype(jnp.dtype(dtype), copy=False)


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
