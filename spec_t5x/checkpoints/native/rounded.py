"""Rounded matrices on disk: whole numbers, and beside each the scales of its groups.

They are the numbers that a model computes with: a rounded matrix that is read back
is rounded to itself (``models.weights.Rounded``).
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from spec_t5x.checkpoints.storage.tensors import Index, Tensor
from spec_t5x.errors import InputError
from spec_t5x.models.weights import GROUP, Rounded

_MATRIX, _SCALES = "/kernel", "/kernel_scales"


def split(
    tensors: Iterable[tuple[str, np.ndarray]], bits: int, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the stored form of weights in float32: matrices rounded, all else as ``dtype``."""
    for path, array in tensors:
        if path.endswith(_MATRIX):
            rounded = Rounded.of(array, bits)
            # Numbers of 4 bits too: compression removes the rest of a byte.
            yield path, np.asarray(rounded.values).astype(np.int8)
            yield path.removesuffix(_MATRIX) + _SCALES, np.asarray(rounded.scales)
        else:
            yield path, array.astype(np.dtype(dtype))


def join(stored: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Returns the weights of a model that ``split`` made, matrices in float32."""
    tensors = {}
    for path, tensor in stored.items():
        if path.endswith(_MATRIX):
            scales = stored.get(path.removesuffix(_MATRIX) + _SCALES)
            groups = {1, -(-tensor.shape[0] // GROUP)}
            if scales is None or scales.shape not in {(n, tensor.shape[1]) for n in groups}:
                raise InputError(
                    f"{source}: {path} has no scales that fit it: copy the whole checkpoint again"
                )
            tensors[path] = _multiplied(tensor, scales)
        elif not path.endswith(_SCALES):
            tensors[path] = tensor
    return tensors


def _multiplied(values: Tensor, scales: Tensor) -> Tensor:
    inner, groups = values.shape[0], scales.shape[0]
    group_of_row = np.arange(inner) // (inner if groups == 1 else GROUP)

    def read(index: Index) -> np.ndarray:
        rows, columns = index
        factors = scales.read((slice(0, groups), columns))[group_of_row[rows]]
        return values.read(index).astype(np.float32) * factors

    # In fewer bits it would be rounded to other numbers.
    return Tensor(
        name=values.name, shape=values.shape, dtype="float32", read=read, keeps_dtype=True
    )
