"""Numbered files of answers, a line for each input, and the one file they become."""

import dataclasses
import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spec_t5x.errors import InputError
from spec_t5x.inference import manifest
from spec_t5x.machine import atomic

STEM = "predictions"
MERGED = f"{STEM}.jsonl"
# What speculation costs where gamma is "auto" (``pace.Costs``).
COSTS = "costs.json"
_SHARD = re.compile(rf"{STEM}-(\d{{5,}})-of-(\d{{5,}})\.jsonl")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """The files of a run. Shards are numbered from 0."""

    directory: Path
    # Inputs in all, and in each shard but the last.
    total: int
    size: int

    @property
    def count(self) -> int:
        """Number of shards."""
        return -(-self.total // self.size)

    @property
    def merged(self) -> Path:
        """The file that holds all lines at the end."""
        return self.directory / MERGED

    def path(self, shard: int) -> Path:
        """``predictions-00003-of-00017.jsonl``."""
        return self.directory / f"{STEM}-{shard:05}-of-{self.count:05}.jsonl"

    def indices(self, shard: int) -> range:
        """The places of a shard's inputs among all."""
        return range(shard * self.size, min((shard + 1) * self.size, self.total))

    def unfinished(self) -> list[int]:
        """Shards whose files are not there yet, in order.

        None once they are joined: the one file may be kept and the shards deleted.
        """
        there = {entry.name for entry in os.scandir(self.directory)}
        if self.merged.name in there:
            return []
        return [shard for shard in range(self.count) if self.path(shard).name not in there]

    def write(self, shard: int, lines: list[bytes]) -> None:
        """Writes a shard, whole or not at all.

        Raises:
          InputError: it cannot be written; the finished ones stay as they are.
        """
        path = self.path(shard)
        write(path, lines, f"shard {shard} of {self.count} ({path.name})")

    def merge(self, seen: Callable[[bytes], None]) -> None:
        """Joins all shards, showing each line to ``seen``.

        Raises:
          InputError: as ``write`` and ``lines``.
        """

        def lines():
            for line in self.lines():
                seen(line)
                yield line

        write(self.merged, lines(), f"{MERGED}, the {self.count} shards in one file")

    def lines(self) -> Iterator[bytes]:
        """All lines in order, each the answer to the input of its place.

        Raises:
          InputError: a file is damaged.
        """
        if self.merged.exists():
            yield from _lines(self.merged, range(self.total))
            return
        for shard in range(self.count):
            yield from _lines(self.path(shard), self.indices(shard))


def write(path: Path, lines: Iterable[bytes], what: str) -> None:
    """Writes a file of a run, whole or not at all.

    Raises:
      InputError: the disk is full or not to be written to.
    """
    try:
        atomic.write_whole(path, lines)
    except OSError as error:
        full = error.errno in _FULL
        remedy = "free some space" if full else "see to the directory"
        raise InputError(
            f"cannot write {what} to {path.parent} ({error.strerror}): {remedy} and give the same "
            "command again, which goes on behind the finished shards"
        ) from error


def holds_answers(directory: Path) -> bool:
    """Whether there are files of a run, whose manifest may be gone."""
    return any(_is_answers(entry.name) for entry in os.scandir(directory))


def remove_answers(directory: Path) -> None:
    """Removes a run: its files first, its manifest last, so that none is left unnamed."""
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if _is_answers(entry.name):
            os.unlink(entry.path)
    for name in (COSTS, manifest.NAME):
        (directory / name).unlink(missing_ok=True)


def error_of(line: bytes) -> str | None:
    """What a line reports instead of an answer: "line 8: the text is empty ..."."""
    # Cheap for the many lines that are answers: only a report has its error this early.
    if not re.match(rb'\{"index": \d+, "\w+": \d+, "error": ', line):
        return None
    values = json.loads(line)
    place = list(values)[1]
    return f"{place} {values[place]}: {values['error']}"


def _lines(path: Path, indices: range) -> Iterator[bytes]:
    """The lines of a file, which are the answers to the inputs at ``indices``."""
    expected = iter(indices)
    with path.open("rb") as file:
        for line in file:
            start = b'{"index": %d, ' % next(expected, -1)
            if not (line.startswith(start) and line.endswith(b"}\n")):
                raise InputError(_damaged(path))
            yield line
    if next(expected, None) is not None:
        raise InputError(_damaged(path))


def _is_answers(name: str) -> bool:
    return name == MERGED or _SHARD.fullmatch(name) is not None


def _damaged(path: Path) -> str:
    return f"{path} is not as it was written: delete it and give the same command again"
