"""Arrays in TensorStore, as T5X's legacy format and Orbax store them.

All arrays are opened concurrently and read by slices. Only drivers and names of arrays are taken
from the checkpoint's index, not paths, because the checkpoint may have moved since it was written.

Orbax's description of a tree, ``_METADATA``, names its arrays; they are in one OCDBT store
(``manifest.ocdbt``), or each in a directory. Trees are read and written without Orbax, so
that a model need not be in memory, and Orbax restores a tree that is written here.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.checkpoints.storage.files import check_inside, describing, read_json, write_json
from spec_t5x.checkpoints.storage.locations import Location, kvstore_spec
from spec_t5x.checkpoints.storage.tensors import Tensor, listed
from spec_t5x.errors import InputError, as_input_error

METADATA_NAME = "_METADATA"

# Content of Orbax's file ``_CHECKPOINT_METADATA``, without machine and time.
_CHECKPOINT_METADATA = {
    "item_handlers": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler."
    "PyTreeCheckpointHandler",
    "metrics": {},
    "performance_metrics": {},
    "init_timestamp_nsecs": None,
    "commit_timestamp_nsecs": None,
    "custom_metadata": {},
}
# Orbax's entry that says whether chunks of zeros are stored.
_STORES_ZEROS = "store_array_data_equal_to_fill_value"
# Orbax's ``value_type`` of leaves that are arrays.
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")

# Bytes of decoded chunks that are cached, because several slices may be of one chunk.
_CACHE_BYTES = 1 << 27
_FILES_AT_ONCE = 32
# Bytes of an array's largest chunk: T5X's bound, which suits all partitionings and file systems.
_CHUNK_BYTES = 1 << 26
# Bytes of arrays after which a transaction is committed, to bound memory.
_COMMIT_BYTES = 1 << 28

COPY_AGAIN = "copy the whole checkpoint again"

# Keys from the root of a tree to a leaf.
Keys = tuple[str, ...]
# An entry of a checkpoint's index: TensorStore's specification of an array, or the array itself.
ArrayEntry = Mapping[str, Any] | np.ndarray


def open_tensors(entries: Mapping[str, ArrayEntry], source: str) -> dict[str, Tensor]:
    """Opens all arrays of the checkpoint ``source`` concurrently; reads no values."""
    import tensorstore as ts

    context = ts.Context(
        {
            "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
            "file_io_concurrency": {"limit": _FILES_AT_ONCE},
        }
    )
    # An absent chunk is an error, not zeros, except in zarr3, which may omit chunks of zeros.
    options = {"open": True, "read": True, "context": context, "recheck_cached_data": "open"}
    futures = {
        path: ts.open({"fill_missing_data_reads": entry["driver"] != "zarr", **entry}, **options)
        for path, entry in entries.items()
        if not isinstance(entry, np.ndarray)
    }
    tensors, absent = {}, []
    for path, entry in entries.items():
        with as_input_error(f"cannot read {path} of {source}", COPY_AGAIN, ValueError, OSError):
            try:
                array = futures[path].result() if path in futures else entry
            except (ValueError, OSError) as error:
                if not str(error).startswith("NOT_FOUND"):
                    raise
                absent.append(path)
            else:
                tensors[path] = _tensor(path, array, source)
    if absent:
        raise InputError(
            f"{source}: {len(absent)} of {len(entries)} arrays are missing ({listed(absent)}): "
            f"{COPY_AGAIN}"
        )
    return tensors


def _tensor(path: str, array: Any, source: str) -> Tensor:
    what = f"cannot read {path} of {source}"

    def read(index):
        if isinstance(array, np.ndarray):
            return np.asarray(array[index])
        part = array[index]
        with as_input_error(what, COPY_AGAIN, ValueError, OSError, MemoryError):
            # TensorStore ends the process if there is no memory for the part or a chunk.
            for shape in (part.shape, array.chunk_layout.read_chunk.shape or ()):
                np.empty(shape, array.dtype.numpy_dtype)
            return part.read().result()

    return Tensor(name=path, shape=tuple(array.shape), dtype=array.dtype.name, read=read)


def zarr_spec(kvstore: Mapping[str, Any], name: str, driver: str = "zarr") -> dict[str, Any]:
    """Returns TensorStore's specification of array ``name`` in ``kvstore``; refuses ``..``."""
    path = f"{kvstore.get('path', '')}{check_inside(name, 'the index of arrays')}/"
    return {"driver": driver, "kvstore": {**kvstore, "path": path}}


def zarr_settings(array: np.ndarray, compressor: str) -> dict[str, Any]:
    """Returns the array's type and zarr's metadata, with chunks of at most ``_CHUNK_BYTES``."""
    chunks = chunk_shape(array.shape, array.itemsize, _CHUNK_BYTES)
    layout = {"shape": list(array.shape), "chunks": chunks}
    compression = {"id": compressor, "level": 1}
    return {"dtype": str(array.dtype), "metadata": {**layout, "compressor": compression}}


def chunk_shape(shape: tuple[int, ...], itemsize: int, limit: int) -> list[int]:
    """Returns ``shape`` with its longest axis halved until a chunk has at most ``limit`` bytes.

    >>> chunk_shape((8, 4), 4, 64)
    [4, 4]
    """
    chunks = list(shape)
    while itemsize * math.prod(chunks) > limit:
        longest = chunks.index(max(chunks))
        chunks[longest] = -(-chunks[longest] // 2)
    return chunks


def arrays_kvstore(location: Location) -> dict[str, Any]:
    """Returns TensorStore's specification of the OCDBT store of all arrays, or of a directory."""
    kvstore = kvstore_spec(location)
    is_one = (location / "manifest.ocdbt").is_file()
    return {"driver": "ocdbt", "base": kvstore} if is_one else kvstore


def orbax_entries(location: Location) -> dict[Keys, ArrayEntry]:
    """Returns the specifications, by keys, of the arrays that Orbax saved; skips other leaves."""
    path = location / METADATA_NAME
    metadata = read_json(path)
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    is_whole = {"fill_missing_data_reads": False} if metadata.get(_STORES_ZEROS) else {}
    kvstore, entries = arrays_kvstore(location), {}
    with describing(path, "arrays"):
        for leaf in metadata["tree_metadata"].values():
            keys = tuple(str(part["key"]) for part in leaf["key_metadata"])
            if leaf["value_metadata"]["value_type"] in _ARRAYS:
                entries[keys] = zarr_spec(kvstore, ".".join(keys), driver) | is_whole
    return entries


def write_tree(location: Path, arrays: Iterable[tuple[Keys, np.ndarray]]) -> None:
    """Writes arrays, with their keys, to a new directory as Orbax does: in one OCDBT store.

    Arrays are taken one by one, and in memory until about ``_COMMIT_BYTES`` of them are committed.
    """
    import tensorstore as ts

    location.mkdir(parents=True)
    kvstore = {"driver": "ocdbt", "base": kvstore_spec(location)}
    context, tree, pending, size = ts.Context(), {}, ts.Transaction(), 0
    for keys, array in arrays:
        spec = zarr_spec(kvstore, ".".join(keys)) | zarr_settings(array, "zstd")
        store = ts.open(spec, create=True, context=context, transaction=pending).result()
        store.write(array).result()
        tree[str(keys)] = {
            # Orbax's type 2 is the key of a dict.
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        size += array.nbytes
        if size > _COMMIT_BYTES:
            pending.commit_async().result()
            pending, size = ts.Transaction(), 0
    pending.commit_async().result()
    metadata = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": False}
    metadata |= {_STORES_ZEROS: True, "custom_metadata": None}
    write_json(location / METADATA_NAME, metadata)
    write_json(location / "_CHECKPOINT_METADATA", _CHECKPOINT_METADATA)
    (location / "commit_success.txt").write_text("Checkpoint commit was successful\n")
