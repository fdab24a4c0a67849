"""Arrays that TensorStore wrote (T5X's legacy format, Orbax), opened and read by slices.

Only what tells arrays apart comes from a checkpoint: driver and name. Where they lie is
where the checkpoint lies now, wherever it was written.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_t5x.checkpoints.storage.abstract import expected_shapes
from spec_t5x.checkpoints.storage.files import check_inside, one_line
from spec_t5x.checkpoints.storage.weights import Index, TensorInfo, check_found
from spec_t5x.errors import InputError
from spec_t5x.models.binding import ModelConfig

# Chunks that several slices share are decoded once: so much of them is kept.
_CACHE_BYTES = 1 << 27
_FILES_AT_ONCE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """An array as a checkpoint's index names it."""

    # What TensorStore opens; None for an array that the index holds itself.
    spec: Mapping[str, Any] | None = None
    value: np.ndarray | None = None
    # Where the index notes it.
    shape: tuple[int, ...] | None = None


class TensorStoreWeights:
    """Opened arrays by our paths; see ``weights.Weights``."""

    def __init__(self, arrays: Mapping[str, Any], source: str, **remedy: str):
        """Takes what ``open_arrays`` returned, and what messages begin and end with."""
        self.source = source
        self._remedy = remedy
        self._arrays = dict(arrays)
        self._tensors = {
            path: TensorInfo(shape=tuple(array.shape), dtype=_dtype_name(array), name=path)
            for path, array in arrays.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All there are."""
        return self._tensors

    def check(self, config: ModelConfig) -> None:
        """As ``weights.Weights``."""
        check_found(self._tensors, expected_shapes(config), self.source, **self._remedy)

    def read(self, path: str, index: Index) -> np.ndarray:
        """As ``weights.Weights``."""
        array = self._arrays[path]
        if isinstance(array, np.ndarray):
            return np.asarray(array[index])
        try:
            return array[index].read().result()
        except (ValueError, OSError) as error:
            raise InputError(
                f"cannot read {path} of {self.source} ({one_line(error)}): copy the whole "
                "checkpoint again"
            ) from error


def open_arrays(entries: Mapping[str, ArrayEntry], source: str) -> dict[str, Any]:
    """Opens every array, all at the same time, and reads none.

    Returns:
        What is there: TensorStores, or numpy arrays that the index holds. An array that
        is named and not there is left out.

    Raises:
        InputError: the description of an array is damaged.
    """
    import tensorstore as ts

    context = ts.Context(
        {
            "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
            "file_io_concurrency": {"limit": _FILES_AT_ONCE},
        }
    )
    futures = {
        path: ts.open(
            {**entry.spec, **_reading(entry.spec), "recheck_cached_data": "open"},
            open=True,
            read=True,
            context=context,
        )
        for path, entry in entries.items()
        if entry.value is None
    }
    arrays = {}
    for path, entry in entries.items():
        if entry.value is not None:
            arrays[path] = entry.value
            continue
        try:
            arrays[path] = futures[path].result()
        except (ValueError, OSError) as error:
            if not str(error).startswith("NOT_FOUND"):
                raise InputError(
                    f"cannot read {path} of {source} ({one_line(error)}): copy the whole "
                    "checkpoint again"
                ) from error
    return arrays


def zarr_spec(kvstore: Mapping[str, Any], name: str, driver: str = "zarr") -> dict[str, Any]:
    """The specification of the array ``name`` in a directory.

    Raises:
        InputError: the name leads out of it.
    """
    path = f"{kvstore.get('path', '')}{check_inside(name, 'the index of arrays')}/"
    return {"driver": driver, "kvstore": {**kvstore, "path": path}}


def chunk_shape(shape: tuple[int, ...], itemsize: int, limit: int) -> list[int]:
    """The shape, halved along its longest side until a chunk has at most ``limit`` bytes.

    >>> chunk_shape((8, 4), 4, 64)
    [4, 4]
    """
    chunks = list(shape)
    while itemsize * math.prod(chunks) > limit:
        longest = chunks.index(max(chunks))
        chunks[longest] = -(-chunks[longest] // 2)
    return chunks


def _dtype_name(array: Any) -> str:
    return str(array.dtype) if isinstance(array, np.ndarray) else array.dtype.name


def _reading(spec: dict[str, Any]) -> dict[str, Any]:
    """A chunk that is not there is an error, where it would else be read as zeros.

    Orbax's newer format, zarr3, may leave out chunks of zeros on purpose.
    """
    return {"fill_missing_data_reads": False} if spec["driver"] == "zarr" else {}
