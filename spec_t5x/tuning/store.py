"""What was found by measuring, remembered in the user's cache.

One small file for each combination of machine, models and settings, named after their hash:
processes that measure different things at once do not meet, of two that measure the same
the last one is remembered, and a file that is damaged is as good as none.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_t5x.compilation_cache import user_cache
from spec_t5x.inference.atomic import write_whole

# Raised whenever an entry's meaning changes: older ones are then not understood.
_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What measuring came to, for one batch size."""

    # 0 where nothing is sure to be faster than plain decoding.
    gamma: int
    # Predicted for that gamma, or for the best one where it is 0, with the interval.
    best_gamma: int
    speed_up: float
    low: float
    high: float
    # Of whole texts, with the best gamma and its guard; None where it was not tried.
    measured: float | None
    # Costs of the best gamma, as the guard wants them: in steps of plain decoding.
    c: float
    verification: float
    prefill: float
    # That this is based on.
    num_inputs: int
    num_tokens: int

    @classmethod
    def from_dict(cls, values: Any) -> "Finding | None":
        """The finding that JSON held; None if it is no finding."""
        fields = dataclasses.fields(cls)
        if not isinstance(values, dict) or set(values) != {field.name for field in fields}:
            return None
        for field in fields:
            value = values[field.name]
            whole = field.type is int
            if value is None and field.name == "measured":
                continue
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                return None
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Store:
    """Findings in a directory, which is made when the first one comes."""

    directory: Path

    @classmethod
    def of_user(cls) -> "Store":
        """The one beside the compiled programs."""
        return cls(user_cache() / "tuning")

    def load(self, key: Mapping[str, Any]) -> Finding | None:
        """What was found for ``key``; None if nothing was, or it cannot be read."""
        try:
            content = json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(content, dict) or content.get("key") != _plain(key):
            return None
        return Finding.from_dict(content.get("finding"))

    def save(self, key: Mapping[str, Any], finding: Finding) -> str | None:
        """Remembers it; says why not where that is not possible."""
        content = {"key": _plain(key), "finding": dataclasses.asdict(finding)}
        text = json.dumps(content, indent=2) + "\n"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(key), [text.encode()])
        except OSError as error:
            return f"not remembered, {self.directory} cannot be written ({error.strerror})"
        return None

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(_plain(key), sort_keys=True)
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _plain(key: Mapping[str, Any]) -> Any:
    """The key as it comes back from JSON."""
    return json.loads(json.dumps({"format": _FORMAT, **key}))
