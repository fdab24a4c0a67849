"""Results of parts, each in a file of its own, under a hash of what it depends on.

A file is there whole or not at all. What it holds is checked when it is read: a file that
was cut, edited or belongs to something else is not used.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from spec_t5x.experiments.reproduction.items import Done, Json, Part
from spec_t5x.machine.atomic import remove_unfinished, write_whole

# Raised when the meaning of these files changes.
_VERSION = 1


class UnusableError(Exception):
    """A kept result that cannot be used, and why."""


class Cache:
    """The kept results in a directory."""

    def __init__(self, directory: Path, machine: Mapping[str, Json]):
        """Uses a directory, which need not be there yet.

        Args:
          directory: of the files.
          machine: part of what every result depends on, with its software: "measured
            here" is to stay true of a directory that was copied, and after an upgrade.
        """
        self.directory = directory
        self._machine = dict(machine)

    def path(self, part: Part) -> Path:
        """Where the part's result is kept."""
        return self.directory / f"{_hash(self._identity(part))[:32]}.json"

    def load(self, part: Part) -> Done | None:
        """The part's result, or None if none was kept.

        Raises:
          UnusableError: the file is not what was written.
        """
        path = self.path(part)
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UnusableError(f"{path.name} cannot be read") from error
        if not isinstance(kept, dict) or kept.get("identity") != self._identity(part):
            raise UnusableError(f"{path.name} is of something else")
        done = Done(result=kept.get("result"), provenance=kept.get("provenance"))
        if kept.get("sum") != _sum(done):
            raise UnusableError(f"{path.name} was changed")
        return done

    def store(self, part: Part, done: Done) -> None:
        """Keeps a result, which must be as ``as_json`` returns it.

        Raises:
          OSError: it cannot be written.
        """
        content = {
            "identity": self._identity(part),
            "provenance": done.provenance,
            "result": done.result,
            "sum": _sum(done),
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(self.path(part), [(json.dumps(content, indent=1) + "\n").encode()])

    def tidy(self) -> None:
        """Removes what a killed run was writing."""
        remove_unfinished(self.directory)

    def _identity(self, part: Part) -> Json:
        return as_json(
            {
                "version": _VERSION,
                "part": part.name,
                "inputs": part.inputs,
                "machine": self._machine,
            }
        )


def as_json(value: Json) -> Json:
    """The value as a file gives it back: without tuples, with texts for keys.

    A run that computes and one that reads what was kept see the same.

    Raises:
      TypeError: it holds what JSON cannot.
    """
    return json.loads(json.dumps(value))


def _canonical(value: Json) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _hash(value: Json) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def _sum(done: Done) -> str:
    return _hash([done.result, done.provenance])
