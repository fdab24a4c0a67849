"""The index of a T5X checkpoint: a tree with the place of each array, or the array itself.

    legacy    checkpoint                      msgpack: version, optimizer/state, optimizer/target
              target.encoder.….kernel/        one zarr array for each parameter
    Orbax     state/_METADATA                 JSON: the names in the tree
              state/manifest.ocdbt, state/d/  all arrays in one OCDBT store; or, in older
                                              ones, a zarr array for each, as above

A leaf of the msgpack file is an array, TensorStore's specification of one, or, if early Orbax wrote
the file, ``PLACEHOLDER://name``. The optimizer's state is not read.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spec_t5x.checkpoints.storage import tensorstore_arrays
from spec_t5x.checkpoints.storage.files import describing
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.tensorstore_arrays import (
    COPY_AGAIN,
    METADATA_NAME,
    ArrayEntry,
    Keys,
)
from spec_t5x.errors import InputError, as_input_error

# Versions of the legacy format that are read. Version 2 differs only in bfloat16, which is stored
# as uint16 and refused.
VERSIONS = (2, 3)

CHECKPOINT_NAME = "checkpoint"

_PLACEHOLDER = "PLACEHOLDER://"
_STEP_DIRECTORY = re.compile(r"checkpoint_(\d+)")

# Paths of the parameters and of the step in the tree; the first that exists is read.
_TARGETS = ("target", "optimizer/target", "_optimizer/target")
_STEPS = ("state/step", "optimizer/state/step", "_optimizer/state/step")
# Top-level entries of a tree without parameters; only the legacy format has "version".
_WITHOUT_PARAMETERS = {"state", "optimizer", "_optimizer", "version"}


def find_t5x(location: Location) -> Location | None:
    """Returns the directory with a T5X checkpoint's index; None if ``location`` has no checkpoint.

    Searches ``location``, its ``state`` and its latest ``checkpoint_STEP``, which must have one.
    """
    for place in (location, location / "state"):
        if any((place / name).is_file() for name in (CHECKPOINT_NAME, METADATA_NAME)):
            return place
    matches = {child: _STEP_DIRECTORY.fullmatch(child.name) for child in location.iterdir()}
    steps = {int(match[1]): child for child, match in matches.items() if match}
    if not steps:
        return None
    latest = steps[max(steps)]
    found = None if latest.is_file() else find_t5x(latest)
    if found is None:
        raise InputError(
            f"{latest} is the latest of {len(steps)} checkpoints in {location} and holds no "
            f"{CHECKPOINT_NAME} or {METADATA_NAME}: copy it again or give the directory of another"
        )
    return found


def read_index(location: Location) -> tuple[dict[str, ArrayEntry], ArrayEntry | None]:
    """Returns the entries of parameters, by path, and of the step (None if not stored)."""
    path = location / CHECKPOINT_NAME
    is_orbax = (location / METADATA_NAME).is_file()
    if is_orbax and not path.is_file():
        stored = tensorstore_arrays.orbax_entries(location)
    else:
        with describing(path, "arrays"):
            leaves, version = dict(_leaves(tree := _read_msgpack(path))), tree.get("version")
            # Early Orbax, too, wrote this file, without a version.
            of_orbax = is_orbax or any(isinstance(leaf, str | bytes) for leaf in leaves.values())
            if not of_orbax and version not in VERSIONS:
                raise InputError(
                    f"{path} has version {version!r}, this spec_t5x reads "
                    f"{' and '.join(map(str, VERSIONS))}: save it with a T5X of 2021 or later"
                )
            kvstore = tensorstore_arrays.arrays_kvstore(location)
            stored = {keys: _entry(leaf, kvstore, keys, path) for keys, leaf in leaves.items()}
    flat = {"/".join(keys): entry for keys, entry in stored.items()}
    for prefix in _TARGETS:
        entries = {
            path.removeprefix(f"{prefix}/"): entry
            for path, entry in flat.items()
            if path.startswith(f"{prefix}/")
        }
        if entries:
            return entries, next((flat[path] for path in _STEPS if path in flat), None)
    found = sorted({path.partition("/")[0] for path in flat})
    if found and set(found) <= _WITHOUT_PARAMETERS:
        raise InputError(
            f"{location} holds an optimizer's state and no parameters: give the checkpoint that "
            f"has them, under {_TARGETS[0]!r}"
        )
    raise InputError(
        f"{location} holds no parameters under {_TARGETS[0]!r}, but "
        f"{', '.join(map(repr, found)) or 'nothing'}: give a checkpoint that T5X saved"
    )


def _read_msgpack(path: Location) -> dict[str, Any]:
    # flax takes a moment to import, and no other format needs it.
    from flax.serialization import msgpack_restore

    with as_input_error(f"cannot read {path}", COPY_AGAIN, OSError):
        content = path.read_bytes()
    if content.startswith(b"model_checkpoint_path"):
        raise InputError(
            f"{path} is a TensorFlow checkpoint: convert it with t5x.scripts.convert_tf_checkpoint"
        )
    with as_input_error(f"cannot read {path} as msgpack", COPY_AGAIN, Exception):
        tree = msgpack_restore(content)
    if not isinstance(tree, dict):
        raise InputError(f"{path} holds no tree of arrays: {COPY_AGAIN}")
    return tree


def _leaves(tree: Mapping, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in tree.items():
        inner = (*path, str(key))
        is_spec = isinstance(value, Mapping) and value.keys() & {"kvstore", "base"}
        if isinstance(value, Mapping) and not (is_spec and "driver" in value):
            yield from _leaves(value, inner)
        elif value is not None:
            yield inner, value


def _entry(leaf: Any, kvstore: Mapping[str, Any], keys: Keys, path: Location) -> ArrayEntry:
    if isinstance(leaf, bytes):
        leaf = leaf.decode(errors="replace")
    if isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER):
        return tensorstore_arrays.zarr_spec(kvstore, leaf.removeprefix(_PLACEHOLDER))
    if not isinstance(leaf, Mapping):
        return np.asarray(leaf)
    leaf = leaf["base"] if leaf["driver"] == "cast" else leaf
    if leaf.get("driver") not in ("zarr", "zarr3"):
        raise InputError(
            f"{path}: {'/'.join(keys)} is stored with TensorStore's driver "
            f"{leaf.get('driver')!r}, T5X uses zarr: give a checkpoint that T5X saved"
        )
    # Only the array's name is used: drivers and buckets are those of the machine that wrote the
    # checkpoint. Older versions of TensorStore have the path outside of "kvstore".
    store = leaf.get("kvstore")
    noted = (store.get("path") if isinstance(store, Mapping) else None) or leaf.get("path")
    name = str(noted).strip("/").rpartition("/")[2] if noted else ".".join(keys[1:])
    return tensorstore_arrays.zarr_spec(kvstore, name, leaf["driver"])
