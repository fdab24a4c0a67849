"""Weights on disk, which a format opens and which are read by slices later.

``check_tensors`` compares names, shapes and types with the expected ones. ``read_params`` reads
parameters onto devices, and ``read_tensors`` whole tensors one by one, for a format to write.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

# Imported because it registers bfloat16 with numpy, and so for safetensors.
import ml_dtypes  # noqa: F401
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.errors import InputError, either, one_line
from spec_t5x.machine.operations import XLA
from spec_t5x.types import PyTree

# Number of tensors that are read ahead, to bound memory.
_AHEAD = 8
# Number of elements that are checked for NaN at a time, to bound memory.
_FINITE_BLOCK = 1 << 24

# Function that is called with the bytes done so far, and with the total.
Report = Callable[[int, int], None]

# Types of stored weights that can be read.
_TYPES = ("float32", "bfloat16", "float16", "float64")
# Number of names that a message lists at most.
_NAMED = 6
_NO_NAMES: Mapping[str, str] = {}

# One slice for each axis; and the slices as pairs (start, stop), which can be keys.
Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor in a file: its description, and a function that reads a part of it."""

    # Name in the checkpoint, for messages.
    name: str
    shape: tuple[int, ...]
    # numpy's name of the stored type, such as "bfloat16".
    dtype: str
    # Reads a slice; is called from several threads; raises ``InputError`` if data are damaged.
    read: Callable[[Index], np.ndarray]
    # True if ``dtype`` is kept when other tensors are cast.
    keeps_dtype: bool = False


# Weights of a model by the paths of our network, such as ``encoder/encoder_norm/scale``, and in its
# shapes; a checkpoint's unknown tensors by their names there.
Tensors = Mapping[str, Tensor]


def array_tensors(params: PyTree) -> dict[str, Tensor]:
    """Returns a ``Tensor``, by path, for each array of a tree in memory."""

    def tensor(path, array):
        shape, dtype = np.shape(array), str(array.dtype)
        return Tensor(name=path, shape=shape, dtype=dtype, read=lambda i: np.asarray(array[i]))

    return {path: tensor(path, array) for path, array in flatten_dict(params, sep="/").items()}


def check_tensors(
    found: Tensors, expected: Mapping[str, tuple[int, ...]], source: str, names: Mapping = _NO_NAMES
) -> None:
    """Raises ``InputError`` unless ``found`` has the expected paths and shapes, and known types.

    ``names`` are the checkpoint's, by path, of those that may be missing.
    """
    common = [path for path in expected if path in found]
    faults = {
        "missing": [names.get(path, path) for path in expected if path not in found],
        "unexpected": [path for path in found if path not in expected],
        "of the wrong shape": [
            f"{path} is {list(found[path].shape)}, not {list(expected[path])}"
            for path in common
            if tuple(found[path].shape) != tuple(expected[path])
        ],
        f"not stored as {either(_TYPES)}": [
            f"{path} is {found[path].dtype}"
            for path in common
            if str(found[path].dtype) not in _TYPES
        ],
    }
    texts = [
        f"{len(faulty)} {kind} ({listed(faulty)})" for kind, faulty in faults.items() if faulty
    ]
    if texts:
        raise InputError(
            f"{source}: tensors do not fit the model's configuration: {', '.join(texts)}: copy the "
            "whole checkpoint again, with the configuration the weights were saved with"
        )


def listed(names: Sequence[str]) -> str:
    """Returns a text with the first six names, and the number of further ones."""
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(one_line, names[:_NAMED])) + more


def read_params(
    tensors: Tensors,
    source: str,
    *,
    dtype: str,
    shardings: PyTree | None = None,
    packed: Callable[[str, np.ndarray | jax.Array], Any] = XLA.packed,
) -> PyTree:
    """Returns the tree of parameters, read slice by slice and cast to ``dtype``.

    With ``shardings``, a tree like the parameters, only the slices that devices of this process
    hold are read, each of them once. ``packed`` gets each parameter's path and values, sharded or
    on the host, and returns the leaf. Raises ``InputError``, which names ``source``, for NaN and
    infinity.
    """
    flat = None if shardings is None else flatten_dict(shardings, sep="/")
    params = {}
    for path, parts in _finite_parts(tensors, source, dtype, flat):
        if flat is None:
            (values,) = parts.values()
        else:
            values = _on_devices(parts, tensors[path].shape, flat[path])
        params[path] = packed(path, values)
    return unflatten_dict(params, sep="/")


def read_tensors(
    tensors: Tensors, source: str, dtype: str, report: Report | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields path and values of every tensor in order, as ``dtype``; reads a few ahead.

    If weights are NaN or infinite, ``InputError`` is raised after the last tensor.
    """
    sizes = (math.prod(tensor.shape) for tensor in tensors.values())
    done, total = 0, jnp.dtype(dtype).itemsize * sum(sizes)
    for path, parts in _finite_parts(tensors, source, dtype):
        (tensor,) = parts.values()
        yield path, tensor
        done += tensor.nbytes
        if report:
            report(done, total)


def _finite_parts(
    tensors: Tensors, source: str, dtype: str, shardings: Mapping | None = None
) -> Iterator[tuple[str, dict[Bounds, np.ndarray]]]:
    """Yields path and slices of each tensor; raises ``InputError`` at the end for NaN, infinity."""

    def read(path: str) -> dict[Bounds, np.ndarray]:
        tensor = tensors[path]
        wanted = jnp.dtype(tensor.dtype if tensor.keeps_dtype else dtype)
        bounds = _local_bounds(tensor.shape, None if shardings is None else shardings[path])
        parts = ((part, tuple(slice(*ends) for ends in part)) for part in bounds)
        return {part: tensor.read(index).astype(wanted, copy=False) for part, index in parts}

    broken = []
    for path, parts in _read_ahead(tensors, read):
        if not all(map(_is_finite, parts.values())):
            broken.append(tensors[path].name)
        yield path, parts
    if broken:
        raise InputError(
            f"{source}: NaN or infinite weights in {len(broken)} of {len(tensors)} tensors "
            f"({listed(broken)}): use an earlier checkpoint or copy this one again"
        )


def _is_finite(array: np.ndarray) -> bool:
    flat = array.reshape(-1)
    blocks = range(0, flat.size, _FINITE_BLOCK)
    return all(np.isfinite(flat[start : start + _FINITE_BLOCK]).all() for start in blocks)


def _local_bounds(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> set[Bounds]:
    """Returns the distinct slices on devices of this process; the whole if ``sharding`` is None."""
    if sharding is None:
        return {tuple((0, length) for length in shape)}
    indices = sharding.addressable_devices_indices_map(shape).values()
    return {_bounds(index, shape) for index in indices}


def _bounds(index: Index, shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(length)[:2] for part, length in zip(index, shape, strict=True))


def _on_devices(
    parts: Mapping[Bounds, np.ndarray], shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> jax.Array:
    return jax.make_array_from_callback(shape, sharding, lambda index: parts[_bounds(index, shape)])


def _read_ahead(tensors: Tensors, read: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """Yields each path with ``read(path)``, in order, while threads read the next ones."""
    pool = ThreadPoolExecutor(_AHEAD)
    paths, pending = iter(tensors), collections.deque()
    try:
        while True:
            for path in itertools.islice(paths, _AHEAD - len(pending)):
                pending.append((path, pool.submit(read, path)))
            if not pending:
                return
            path, future = pending.popleft()
            yield path, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
