"""Writing checkpoints in T5X's legacy format, without T5X.

A checkpoint holds the parameters and the step, without an optimizer's state. T5X restores it for
inference, evaluation and fine-tuning.
"""

import dataclasses
import re
from pathlib import Path

import numpy as np
from flax.traverse_util import unflatten_dict

from spec_t5x.checkpoints.native import model_files
from spec_t5x.checkpoints.storage.files import SIDECAR_NAME, write_json
from spec_t5x.checkpoints.storage.locations import kvstore_spec
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensors import Report, read_tensors
from spec_t5x.checkpoints.storage.tensorstore_arrays import zarr_settings, zarr_spec
from spec_t5x.checkpoints.t5x.index import CHECKPOINT_NAME
from spec_t5x.checkpoints.t5x.scanned import scanned
from spec_t5x.errors import InputError

# Version of the legacy format since June 2021.
_VERSION = 3


def write_model(stage: Path, stored: StoredModel, dtype: str, report: Report | None) -> None:
    """Writes a T5X checkpoint to ``stage``, as ``dtype``, of step ``stored.metadata["step"]``.

    T5X configures the network in gin files. For readers without T5X the configuration is in one
    more file, ``spec_t5x.json``. ``report`` is that of ``convert``.
    """
    import tensorstore as ts
    from flax.serialization import msgpack_serialize

    write_json(stage / SIDECAR_NAME, model_files.describe(stored, dtype))
    specs = {}
    for path, tensor in read_tensors(stored.tensors, str(stored.directory), dtype, report):
        name = ".".join(("target", *path.split("/")))
        common = {"driver": "zarr", **zarr_settings(tensor, "gzip")}
        store = ts.open({**zarr_spec(kvstore_spec(stage), name), **common}, create=True)
        store.result().write(tensor).result()
        # The path is relative, so that a checkpoint may be moved.
        specs[path] = {**common, "kvstore": {"driver": "file", "path": f"{name}/"}}
    step, target = np.int32(stored.metadata["step"]), unflatten_dict(specs, sep="/")
    tree = {"version": _VERSION, "optimizer": {"state": {"step": step}, "target": target}}
    (stage / CHECKPOINT_NAME).write_bytes(msgpack_serialize(tree))


def write_scanned(stage: Path, stored: StoredModel, dtype: str, report: Report | None) -> None:
    """Writes as ``write_model`` does, but scanned layers, for T5X's ``scalable_t5``."""
    config = dataclasses.replace(stored.config, relpos_per_layer=True)
    tensors = scanned(stored.tensors, stored.config.head_dim)
    write_model(stage, dataclasses.replace(stored, tensors=tensors, config=config), dtype, report)


def step_of(directory: Path) -> int:
    """Returns N of a directory called ``checkpoint_N``; raises ``InputError`` for other names."""
    match = re.fullmatch(r"checkpoint_(\d+)", directory.name)
    if not match:
        raise InputError(
            f"{directory} is not the name of a T5X checkpoint: give one that ends in "
            f"checkpoint_STEP, such as {directory / 'checkpoint_0'}"
        )
    return int(match[1])
