"""Trees of arrays as Orbax saves them, read and written without it.

Its description of the tree, ``_METADATA``, names the arrays; they lie in one OCDBT store
(``manifest.ocdbt``), or in a directory each. Read so, every array is opened at once and
read by slices, alone or with others, as those of T5X's legacy format are; written so, a
model need not be in memory. Orbax restores what is written here.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.checkpoints.storage.files import one_line, read_json, write_json
from spec_t5x.checkpoints.storage.locations import Location, kvstore_spec
from spec_t5x.checkpoints.storage.tensorstore_arrays import ArrayEntry, chunk_shape, zarr_spec
from spec_t5x.errors import InputError

METADATA_NAME = "_METADATA"
_MANIFEST_NAME = "manifest.ocdbt"

# What Orbax notes beside the tree, but for the machine and the time.
_CHECKPOINT_METADATA = {
    "item_handlers": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler."
    "PyTreeCheckpointHandler",
    "metrics": {},
    "performance_metrics": {},
    "init_timestamp_nsecs": None,
    "commit_timestamp_nsecs": None,
    "custom_metadata": {},
}

# Arrays written in one go, and the largest piece of one: bounds on memory.
_COMMIT_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 26

# What Orbax calls the leaves that are arrays.
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")

# The keys on the way to a leaf.
Keys = tuple[str, ...]


def orbax_entries(location: Location) -> dict[Keys, ArrayEntry]:
    """The arrays of a tree that Orbax saved in ``location``, by the keys on the way to them.

    Raises:
        InputError: the description of the tree is damaged.
    """
    path = location / METADATA_NAME
    metadata = read_json(path)
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    kvstore = arrays_kvstore(location)
    entries = {}
    try:
        for leaf in metadata["tree_metadata"].values():
            keys = tuple(str(part["key"]) for part in leaf["key_metadata"])
            if leaf["value_metadata"]["value_type"] in _ARRAYS:
                entries[keys] = ArrayEntry(spec=zarr_spec(kvstore, ".".join(keys), driver))
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"cannot read {path} as a description of arrays ({one_line(error)}): copy the "
            "whole checkpoint again"
        ) from error
    return entries


def arrays_kvstore(location: Location) -> dict[str, Any]:
    """Where the arrays of a checkpoint are: one store of them all, or their directories."""
    if (location / _MANIFEST_NAME).is_file():
        return {"driver": "ocdbt", "base": kvstore_spec(location)}
    return kvstore_spec(location)


def write_tree(location: Path, arrays: Iterable[tuple[Keys, np.ndarray]]) -> None:
    """Writes arrays, by the keys on the way to them, as Orbax does: one OCDBT store.

    Args:
        location: a directory that is not there yet.
        arrays: taken one after another; a few are in memory at a time.

    Raises:
        InputError: they cannot be written.
    """
    import tensorstore as ts

    location.mkdir(parents=True)
    kvstore = {"driver": "ocdbt", "base": kvstore_spec(location)}
    context, tree, pending, size = ts.Context(), {}, ts.Transaction(), 0
    try:
        for keys, array in arrays:
            spec = zarr_spec(kvstore, ".".join(keys)) | {
                "dtype": str(array.dtype),
                "metadata": {
                    "shape": list(array.shape),
                    "chunks": chunk_shape(array.shape, array.itemsize, _CHUNK_BYTES),
                    "compressor": {"id": "zstd", "level": 1},
                },
            }
            store = ts.open(spec, create=True, context=context, transaction=pending).result()
            store.write(array).result()
            tree[str(keys)] = _describe(keys)
            size += array.nbytes
            if size > _COMMIT_BYTES:
                pending.commit_async().result()
                pending, size = ts.Transaction(), 0
        pending.commit_async().result()
    except (ValueError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"cannot write to {location} ({one_line(error)}): make room there or choose another "
            "directory"
        ) from error
    metadata = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": False}
    metadata |= {"store_array_data_equal_to_fill_value": True, "custom_metadata": None}
    write_json(location / METADATA_NAME, metadata)
    write_json(location / "_CHECKPOINT_METADATA", _CHECKPOINT_METADATA)
    (location / "commit_success.txt").write_text("Checkpoint commit was successful\n")


def _describe(keys: Keys) -> dict[str, Any]:
    # Of a dict all keys are of type 2.
    return {
        "key_metadata": [{"key": key, "key_type": 2} for key in keys],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }
