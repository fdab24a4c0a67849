"""Rounded matrices on disk: for each matrix its integers and the scales of its groups.

Reading multiplies integers and scales. Rounding the product gives the same integers and scales
again (``models.weights.Rounded``), so that a stored model computes as it did before.
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
    """Yields float32 weights as stored: matrices as integers and scales, others as ``dtype``."""
    for path, array in tensors:
        if path.endswith(_MATRIX):
            rounded = Rounded.of(array, bits)
            # One byte also for an integer of 4 bits: compression removes the other bits.
            yield path, np.asarray(rounded.values).astype(np.int8)
            yield path.removesuffix(_MATRIX) + _SCALES, np.asarray(rounded.scales)
        else:
            yield path, array.astype(np.dtype(dtype))


def join(stored: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Returns the weights that ``split`` stored: matrices times their scales, in float32."""
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

    # A cast to fewer bits would change the integers to which the matrix is rounded.
    return Tensor(
        name=values.name, shape=values.shape, dtype="float32", read=read, keeps_dtype=True
    )
