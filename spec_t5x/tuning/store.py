"""Measurements kept in the user's cache.

There is one small file for each combination of machine, models and settings, named after their
hash. Of two processes that measure the same, the last one's result is kept; a damaged file counts
as none.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from spec_t5x.machine.atomic import write_whole
from spec_t5x.machine.compilation_cache import user_cache

# Raised whenever an entry's meaning changes: older entries are then ignored.
_FORMAT = 5

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Store:
    """Values of JSON in a directory, which is made when the first one is saved."""

    directory: Path

    @classmethod
    def of_user(cls) -> "Store":
        """Returns the one beside the compiled programs."""
        return cls(user_cache() / "costs")

    def load(self, key: Mapping[str, Any], parse: Callable[[Any], T]) -> T | None:
        """Parses the value for ``key``; returns None if there is none, or none that parses."""
        try:
            content = json.loads(self._path(key).read_text(encoding="utf-8"))
            return parse(content["value"]) if content["key"] == _plain(key) else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def save(self, key: Mapping[str, Any], value: Any) -> str | None:
        """Keeps a value; returns the reason if that fails."""
        text = json.dumps({"key": _plain(key), "value": value}, indent=2) + "\n"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(key), [text.encode()])
        except OSError as error:
            return f"which is not remembered: {self.directory} cannot be written ({error.strerror})"
        return None

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(_plain(key), sort_keys=True)
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _plain(key: Mapping[str, Any]) -> Any:
    """Returns the key as it comes back from JSON."""
    return json.loads(json.dumps({"format": _FORMAT, **key}))
