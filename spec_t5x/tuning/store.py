"""Store of measurements in the user's cache directory, and their keys.

There is one small file for each combination of machine, models and settings, named by the hash of
these. If two processes measure the same combination, the result of the last is kept. A damaged
file counts as missing.
"""

import dataclasses
import functools
import hashlib
import json
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.loops.compiled import classes_of
from spec_t5x.machine.atomic import write_whole
from spec_t5x.machine.description import machine
from spec_t5x.types import PyTree

# Numbers that a digest reads along each axis of a parameter, or up to twice as many.
_SAMPLES = 8
# Raised whenever an entry's meaning changes: older entries are then ignored.
_FORMAT = 6

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Store:
    """Values of JSON in a directory, which is made when the first value is saved."""

    directory: Path

    def load(self, key: Mapping[str, Any], parse: Callable[[Any], T]) -> T | None:
        """Returns the parsed value for ``key``; None if it is missing or cannot be parsed."""
        try:
            content = json.loads(self._path(key).read_text(encoding="utf-8"))
            return parse(content["value"]) if content["key"] == _plain(key) else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def save(self, key: Mapping[str, Any], value: Any) -> str | None:
        """Writes the value for ``key``; returns a clause for a message if that fails, else None."""
        text = json.dumps({"key": _plain(key), "value": value}, indent=2) + "\n"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(key), [text.encode()])
        except OSError as error:
            return f"but cannot store them: {self.directory} cannot be written ({error.strerror})"
        return None

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(_plain(key), sort_keys=True)
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _plain(key: Mapping[str, Any]) -> Any:
    """Returns the key with the format's number, as it is after a round trip through JSON."""
    return json.loads(json.dumps({"format": _FORMAT, **key}))


def identity(**parts: Any) -> dict[str, Any]:
    """Returns the key of this machine, the package's source and ``parts``, which JSON can hold."""
    return {"machine": machine(), "program": _source(), **parts}


@functools.cache
def _source() -> str:
    """Returns a hash (hex) of the package's source files, kernels included."""
    package, total = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted((*package.rglob("*.py"), *package.rglob("*.cc"))):
        total.update(path.read_bytes())
    return total.hexdigest()


def code_digest(*objects: Any) -> str:
    """Returns a hash (hex) of the modules outside of the package that define models and drafts.

    A class defined in a notebook, where it may be defined again, gets another hash in each call.
    """
    files = set()
    for module in {cls.__module__ for cls in classes_of(*objects)}:
        if not module.startswith("spec_t5x."):
            file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
            files.add(file.read_bytes() if file.is_file() else uuid.uuid4().bytes)
    return hashlib.sha256(b"".join(sorted(files))).hexdigest()


def params_digest(model: PyTree) -> str:
    """Returns a hash (hex) of a model's or draft's structure, settings, shapes and parameters.

    Large parameters are read on a grid, which suffices: training changes weights everywhere.
    """
    total = hashlib.sha256(str(jax.tree.structure(model)).encode())
    for leaf in jax.tree.leaves(model):
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise InputError(f"{type(leaf).__name__} among the parameters: give arrays")
        samples, where = _samples(leaf)
        total.update(f"{leaf.shape}{leaf.dtype}{where}".encode() + samples.tobytes())
    return total.hexdigest()


def _samples(leaf: jax.Array | np.ndarray) -> tuple[np.ndarray, str]:
    """Returns a grid of the numbers of a parameter's first shard, and the sharding in words."""
    where = ""
    if isinstance(leaf, jax.Array):
        shard = leaf.addressable_shards[0].data
        where = f"{shard.shape} on {len(leaf.sharding.device_set)}"
        # Host memory is read in place.
        leaf = np.asarray(shard) if jax.default_backend() == "cpu" else shard
    steps = tuple(slice(None, None, max(1, size // _SAMPLES)) for size in leaf.shape)
    return np.ascontiguousarray(leaf[steps]), where
