"""What measured costs hold for: this machine, these models, these settings."""

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.types import PyTree

# Numbers of each axis of a parameter that a fingerprint takes in.
_SAMPLES = 8


def identity(target: PyTree, draft: PyTree, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the costs of a pair depend on, as JSON can hold it.

    Args:
      target, draft: the models.
      settings: how they decode.
    """
    return {
        "machine": machine(),
        "target": fingerprint(target),
        "draft": fingerprint(draft),
        "settings": dict(settings),
    }


def machine() -> dict[str, Any]:
    """Devices, threads and versions."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "num_devices": jax.local_device_count(),
        "processor": processor(),
        "threads": _threads(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "jax": jax.__version__,
        "spec_t5x": _version(),
    }


def processor() -> str:
    """The processor's name where the system tells it, its architecture elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def fingerprint(model: PyTree) -> str:
    """A hash (hex) of a model's or draft's structure, settings, shapes and parameters.

    Of large parameters it takes in numbers from all over them: weights that were trained on
    differ everywhere. It says what the model *is*, not where it was read from.

    Raises:
      InputError: a leaf that is no array.
    """
    total = hashlib.sha256(str(jax.tree.structure(model)).encode())
    for leaf in jax.tree.leaves(model):
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise InputError(f"{type(leaf).__name__} among the parameters: give arrays")
        samples, where = _samples(leaf)
        total.update(f"{leaf.shape}{leaf.dtype}{where}".encode() + samples.tobytes())
    return total.hexdigest()


def _samples(leaf: jax.Array | np.ndarray) -> tuple[np.ndarray, str]:
    """Some of the numbers, and how the parameter is shared out among devices."""
    where = ""
    if isinstance(leaf, jax.Array):
        shard = leaf.addressable_shards[0].data
        where = f"{shard.shape} on {len(leaf.sharding.device_set)}"
        # What lies in this machine's memory is looked at in place.
        leaf = np.asarray(shard) if jax.default_backend() == "cpu" else shard
    steps = tuple(slice(None, None, max(1, size // _SAMPLES)) for size in leaf.shape)
    return np.ascontiguousarray(leaf[steps]), where


def _threads() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version() -> str | None:
    try:
        return importlib.metadata.version("spec_t5x")
    except importlib.metadata.PackageNotFoundError:
        return None
