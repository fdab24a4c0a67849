"""Writing checkpoints in T5X's legacy format, without T5X.

What T5X restores for inference, evaluation and fine-tuning: the parameters and the step.
There is no optimizer state.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from spec_t5x.checkpoints.native import model_files
from spec_t5x.checkpoints.storage.files import SIDECAR_NAME, write_json
from spec_t5x.checkpoints.storage.locations import kvstore_spec
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensors import Report, read_tensors
from spec_t5x.checkpoints.storage.tensorstore_arrays import array_metadata, zarr_spec
from spec_t5x.checkpoints.t5x.index import CHECKPOINT_NAME
from spec_t5x.checkpoints.t5x.scanned import scanned
from spec_t5x.errors import InputError

# The legacy format's since June 2021.
_VERSION = 3

_NAME = re.compile(r"checkpoint_(\d+)")


def write_model(stage: Path, stored: StoredModel, dtype: str, report: Report | None) -> None:
    """Writes what T5X restores of ``…/checkpoint_STEP``; see ``formats``.

    The step is among the model's metadata. T5X has the network in gin: it is noted
    beside what T5X reads, for those who read the checkpoint without T5X (``spec_t5x.json``).
    """
    write_json(stage / SIDECAR_NAME, model_files.describe(stored, dtype))
    specs = _write_arrays(stage, stored, dtype, report)
    _write_index(stage / CHECKPOINT_NAME, specs, stored.metadata["step"])


def write_scanned(stage: Path, stored: StoredModel, dtype: str, report: Report | None) -> None:
    """``write_model`` for T5X's ``scalable_t5``, whose layers are scanned."""
    config = dataclasses.replace(stored.config, relpos_per_layer=True)
    tensors = scanned(stored.tensors, stored.config.head_dim)
    write_model(stage, dataclasses.replace(stored, tensors=tensors, config=config), dtype, report)


def step_of(directory: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(directory.name)
    if not match:
        raise InputError(
            f"{directory} is no name of a T5X checkpoint: give one that ends in "
            f"checkpoint_STEP, such as {directory / 'checkpoint_0'}"
        )
    return int(match[1])


def _write_arrays(
    stage: Path, stored: StoredModel, dtype: str, report: Report | None
) -> dict[str, dict[str, Any]]:
    """Writes every parameter; returns what the index notes of each, by path."""
    import tensorstore as ts

    specs = {}
    for path, tensor in read_tensors(stored.tensors, str(stored.directory), dtype, report):
        name = ".".join(("target", *path.split("/")))
        metadata = array_metadata(tensor, "gzip")
        common = {"driver": "zarr", "dtype": dtype, "metadata": metadata}
        store = ts.open({**zarr_spec(kvstore_spec(stage), name), **common}, create=True)
        store.result().write(tensor).result()
        # Relative: a checkpoint may be moved.
        specs[path] = {**common, "kvstore": {"driver": "file", "path": f"{name}/"}}
    return specs


def _write_index(path: Path, specs: Mapping[str, dict[str, Any]], step: int) -> None:
    from flax.serialization import msgpack_serialize

    tree = {
        "version": _VERSION,
        "optimizer": {
            "state": {"step": np.int32(step)},
            "target": unflatten_dict(dict(specs), sep="/"),
        },
    }
    path.write_bytes(msgpack_serialize(tree))
