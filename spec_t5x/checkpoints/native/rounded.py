"""Matrices on disk as integers of 8 bits, and beside each its scales.

A *rounded* model computes with integers and scales (``models.weights.Rounded``); a rounded
matrix that is read back is rounded to itself. A model of dtype *int8* computes in bfloat16: its
scales are powers of two, so that the products, of 7 bits, are bfloat16 without rounding.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from spec_t5x.checkpoints.storage.tensors import Index, Tensor
from spec_t5x.checkpoints.storage.tensorstore_arrays import COPY_AGAIN
from spec_t5x.errors import InputError
from spec_t5x.models.weights import GROUP, TABLES, Rounded, powers_of_two

_SCALES = "_scales"
# Arrays by their paths, one after another.
Arrays = Iterable[tuple[str, np.ndarray]]


def split(tensors: Arrays, bits: int, dtype: str) -> Arrays:
    """Yields the stored form of a rounded model: float32 kernels rounded, all else ``dtype``."""
    for path, array in tensors:
        if path.endswith("/kernel"):
            rounded = Rounded.of(array, bits)
            # One byte also for an integer of 4 bits: compression removes the other bits.
            yield path, np.asarray(rounded.values).astype(np.int8)
            yield path + _SCALES, np.asarray(rounded.scales)
        else:
            yield path, array.astype(np.dtype(dtype))


def split_exactly(tensors: Arrays) -> Arrays:
    """Yields the stored form of a model in int8: float32 matrices in int8, all else in bfloat16.

    Each column of a kernel, and each row of an embedding, has a power of two. Writing what was
    read back yields the same arrays.
    """
    for path, array in tensors:
        name = path.rpartition("/")[2]
        if name != "kernel" and name not in TABLES:
            yield path, array.astype(np.dtype("bfloat16"))
            continue
        scales = powers_of_two(array, axis=1 if name in TABLES else 0)
        yield path, np.rint(array / scales).astype(np.int8)
        yield path + _SCALES, scales


def join(stored: Mapping[str, Tensor], source: str, dtype: str) -> dict[str, Tensor]:
    """Returns the weights of a model that was split, matrices as ``dtype``.

    If it is "float32", they are never cast: in fewer bits they would be rounded to other numbers.
    """
    tensors = {path: tensor for path, tensor in stored.items() if not path.endswith(_SCALES)}
    for path, tensor in tensors.items():
        if tensor.dtype != "int8":
            continue
        scales, (inner, features) = stored.get(path + _SCALES), tensor.shape
        groups = {(1, features), (-(-inner // GROUP), features), (inner, 1)}
        if scales is None or scales.shape not in groups:
            raise InputError(f"{source}: {path} has no scales that fit it: {COPY_AGAIN}")
        tensors[path] = _multiplied(tensor, scales, dtype)
    return tensors


def _multiplied(values: Tensor, scales: Tensor, dtype: str) -> Tensor:
    inner, groups = values.shape[0], scales.shape[0]
    group_of_row = np.arange(inner) // {1: inner, inner: 1}.get(groups, GROUP)

    def read(index: Index) -> np.ndarray:
        rows, columns = index
        columns = columns if scales.shape[1] > 1 else slice(0, 1)
        factors = scales.read((slice(0, groups), columns))[group_of_row[rows]]
        return (values.read(index).astype(np.float32) * factors).astype(np.dtype(dtype))

    kept = {"keeps_dtype": dtype == "float32"}
    return Tensor(name=values.name, shape=values.shape, dtype=dtype, read=read, **kept)
