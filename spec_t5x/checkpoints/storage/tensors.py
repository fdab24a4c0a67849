"""Weights on disk: opened by a format, read by slices on demand.

``check_tensors`` looks at their names, shapes and types. ``read_params`` brings them onto devices
or into host memory; ``read_tensors`` hands them to a format that writes them.
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

# Tensors that are read at once, or wait to be handed on: a bound on memory.
_AHEAD = 8
# Elements looked at in one go: bounds the memory that the check for NaN takes.
_FINITE_BLOCK = 1 << 24

# Called with the bytes that are done, and with their total.
Report = Callable[[int, int], None]

# What weights may be stored as.
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

    # What the checkpoint calls it; messages do, too.
    name: str
    shape: tuple[int, ...]
    # numpy's name of the stored type, such as "bfloat16".
    dtype: str
    # Called from several threads; raises ``InputError`` where the data are damaged.
    read: Callable[[Index], np.ndarray]
    # Whether it stays of this type, whatever the others are cast to.
    keeps_dtype: bool = False


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


def check_tensors(
    found: Tensors,
    expected: Mapping[str, tuple[int, ...]],
    source: str,
    names: Mapping[str, tuple[str, bool]] | None = None,
) -> None:
    """Refuses tensors that do not fit the shapes expected, with every fault in one line.

    ``names`` are the checkpoint's own names of our paths, and which tensors it holds transposed.
    """
    names = names or {}

    def named(path: str) -> str:
        return names[path][0] if path in names else path

    def shape(path: str, sizes: Sequence[int]) -> list[int]:
        return list(sizes)[::-1] if path in names and names[path][1] else list(sizes)

    common = [path for path in expected if path in found]
    faults = {
        "missing": [named(path) for path in expected if path not in found],
        "unexpected": [path for path in found if path not in expected],
        "of the wrong shape": [
            f"{named(path)} is {shape(path, found[path].shape)}, not {shape(path, expected[path])}"
            for path in common
            if tuple(found[path].shape) != tuple(expected[path])
        ],
        f"not stored as {', '.join(_TYPES[:-1])} or {_TYPES[-1]}": [
            f"{named(path)} is {found[path].dtype}"
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
    """The first few names, and how many more there are."""
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
    """The weights as our tree of parameters.

    Args:
        tensors: what to read.
        source: begins every message.
        dtype: what each slice is cast to, as it is read (``Tensor.keeps_dtype``).
        shardings: a tree like the parameters; None is JAX's default device. Only the slices that
            devices of this process hold are read, each of them once, whatever the number of
            devices that hold it.
        packed: ``machine.operations.Operations.packed``, of each parameter as it is read; not of
            those that are sharded.
    """
    flat = None if shardings is None else flatten_dict(shardings, sep="/")
    params = {}
    for path, parts in _finite_parts(tensors, source, dtype, flat):
        if flat is not None:
            params[path] = _on_devices(parts, tensors[path].shape, flat[path])
            continue
        (whole,) = parts.values()
        name = path.rpartition("/")[2]
        params[path] = packed(name, whole)
    return unflatten_dict(params, sep="/")


def read_tensors(
    tensors: Tensors, source: str, dtype: str, report: Report | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor, whole and as ``dtype``, in order; a few are read ahead.

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
    """The slices of each tensor, in order; refuses at the end what is not finite."""

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
    """What devices of this process hold of an array, each slice once; without a sharding all."""
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
    """``read`` of each path, in order; the next ones are read meanwhile."""
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
