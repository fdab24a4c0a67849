"""Weights on disk: opened by a format, read by slices on demand.

``check_tensors`` compares their names, shapes and types with the expected ones. ``read_params``
reads them onto devices or into host memory, ``read_tensors`` for a format that writes them.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

# Imported for its effect: it teaches numpy bfloat16.
import ml_dtypes  # noqa: F401
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.errors import InputError
from spec_t5x.machine.operations import XLA
from spec_t5x.types import PyTree

# Tensors that are read ahead: a bound on memory.
_AHEAD = 8
# Elements that are checked for NaN at a time: a bound on memory.
_FINITE_BLOCK = 1 << 24

# Called with the bytes that are done, and with their total.
Report = Callable[[int, int], None]

# Types of stored weights.
_TYPES = ("float32", "bfloat16", "float16", "float64")
# Faults of a kind that a message names.
_NAMED = 6

# One slice for each axis; and the same as numbers, which can be compared.
Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor in a file: its description, and a function that reads a part of it."""

    # The checkpoint's name, for messages.
    name: str
    shape: tuple[int, ...]
    # numpy's name of the stored type, such as "bfloat16".
    dtype: str
    # Called from several threads; raises ``InputError`` if the data are damaged.
    read: Callable[[Index], np.ndarray]
    # Keeps the type when the others are cast.
    keeps_dtype: bool = False


# The weights of a model by our paths, such as ``encoder/encoder_norm/scale``, in the shapes
# that our network has; a checkpoint's other tensors by their names there.
Tensors = Mapping[str, Tensor]


def array_tensors(params: PyTree) -> dict[str, Tensor]:
    """Describes a tree of arrays in memory."""

    def tensor(path, array):
        shape, dtype = np.shape(array), str(array.dtype)
        return Tensor(name=path, shape=shape, dtype=dtype, read=lambda i: np.asarray(array[i]))

    flat = flatten_dict(params, sep="/")
    return {path: tensor(path, array) for path, array in flat.items()}


def check_tensors(found: Tensors, expected: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Refuses tensors that do not fit the shapes expected, with every fault in one line."""
    common = [path for path in expected if path in found]
    faults = {
        "missing": [path for path in expected if path not in found],
        "unexpected": [path for path in found if path not in expected],
        "of the wrong shape": [
            f"{path} is {list(found[path].shape)}, not {list(expected[path])}"
            for path in common
            if tuple(found[path].shape) != tuple(expected[path])
        ],
        f"not stored as {', '.join(_TYPES[:-1])} or {_TYPES[-1]}": [
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
    """Returns the first few names, and how many more there are."""
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def read_params(
    tensors: Tensors,
    source: str,
    *,
    dtype: str,
    shardings: PyTree | None = None,
    packed: Callable[[str, np.ndarray], Any] = XLA.packed,
) -> PyTree:
    """Reads the weights as our tree of parameters, each slice cast to ``dtype`` as it is read.

    With ``shardings``, a tree like the parameters, only the slices that devices of this process
    hold are read, each of them once. Otherwise each parameter is ``packed``
    (``machine.operations.Operations``) as it is read. Messages begin with ``source``.
    """
    flat = None if shardings is None else flatten_dict(shardings, sep="/")
    params = {}
    for path, parts in _finite_parts(tensors, source, dtype, flat):
        if flat is None:
            (whole,) = parts.values()
            params[path] = packed(path.rpartition("/")[2], whole)
        else:
            params[path] = _on_devices(parts, tensors[path].shape, flat[path])
    return unflatten_dict(params, sep="/")


def read_tensors(
    tensors: Tensors, source: str, dtype: str, report: Report | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor, whole and as ``dtype``, in order; a few are read ahead.

    Weights that are not finite are refused at the end.
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
    """Yields the slices of each tensor, in order; refuses NaN and infinity at the end."""

    def read(path: str) -> dict[Bounds, np.ndarray]:
        tensor = tensors[path]
        bounds = _local_bounds(tensor.shape, None if shardings is None else shardings[path])
        return {part: _read(tensor, tuple(slice(*ends) for ends in part), dtype) for part in bounds}

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
    """Returns the slices on devices of this process, each once; without a sharding the whole."""
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


def _read(tensor: Tensor, index: Index, dtype: str) -> np.ndarray:
    wanted = tensor.dtype if tensor.keeps_dtype else dtype
    return tensor.read(index).astype(jnp.dtype(wanted), copy=False)


def _read_ahead(tensors: Tensors, read: Callable[[str], _Result]) -> Iterator[tuple[str, _Result]]:
    """Yields ``read`` of each path, in order, while threads read the next ones."""
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
