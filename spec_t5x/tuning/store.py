"""Store of measurements in the user's cache directory.

There is one small file for each combination of machine, models and settings, named by the hash of
these. If two processes measure the same combination, the result of the last is kept. A damaged
file counts as missing.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from spec_t5x.machine.atomic import write_whole

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
