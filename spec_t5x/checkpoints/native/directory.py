"""Functions that the native formats share: config.json, and a draft's safetensors file."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.checkpoints.storage.files import reading_weights
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.errors import InputError


@dataclasses.dataclass(frozen=True)
class DraftFormat:
    """A format of drafts that belong to one target."""

    # The value of "format" in config.json.
    name: str
    # The file with the arrays.
    file: str
    # The draft and the command that writes it, for messages: "give {made_by} wrote".
    made_by: str
    version: int = 1


def with_extra(metadata: dict[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merges ``extra`` into ``metadata``; raises ``InputError`` if a name is in both."""
    taken = sorted(set(metadata) & set(extra or {}))
    if taken:
        raise InputError(f"extra entry {taken[0]!r} is a name of the format: rename the entry")
    return metadata | dict(extra or {})


def check_format(
    metadata: dict[str, Any], path: Location, name: str, version: int, remedy: str
) -> None:
    """Raises ``InputError`` on another format, with ``remedy``, or another version."""
    if metadata.get("format") != name:
        raise InputError(f"{path} has format {metadata.get('format')!r}, not {name!r}: {remedy}")
    check_known(path, "version", metadata.get("version"), (version,))


def check_known(path: Location, name: str, value: Any, known: Collection) -> None:
    """Raises ``InputError`` if the entry ``name`` of config.json has a value not ``known``."""
    if value not in known:
        raise InputError(
            f"{path} has {name} {value!r}, this spec_t5x reads {', '.join(map(str, known))}: "
            "install the release that wrote it"
        )


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a draft's file, by name, in their stored types."""
    from safetensors.numpy import load_file

    with reading_weights(path):
        return load_file(path)
