"""Files in the output directory of a run.

    manifest.json                        inputs and settings, which keep runs from being mixed
    costs.json                           measured costs of speculation, if gamma is "auto"
    predictions-00003-of-00017.jsonl     an answer on each line, for each input of a shard
    predictions.jsonl                    the lines of all shards

Each file is written whole or not at all; a run has no other state.
"""

import dataclasses
import errno
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError, as_input_error
from spec_t5x.machine import atomic

log = logging.getLogger(__name__)

MANIFEST, COSTS, MERGED = "manifest.json", "costs.json", "predictions.jsonl"
_HEADER = {"format": "spec_t5x predictions", "version": 1}
_SHARD = re.compile(r"predictions-\d{5,}-of-\d{5,}\.jsonl")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Record of a run's inputs and settings."""

    # Name of the source; not compared, since a file may be moved.
    source: str
    # Number of inputs, and the SHA-256 (hex) of each shard's.
    count: int
    digests: list[str]
    # Settings that decide the answers, as values of JSON; a checkpoint is
    # {"name": ..., "content": DIGEST}, of which only the content is compared.
    settings: dict[str, Any]

    def check_same(self, now: "Manifest", directory: Path) -> None:
        """Raises ``InputError``, with all differences, if ``now`` has other settings or inputs."""
        differences = []
        for name in {**self.settings, **now.settings}:
            was, now_is = (each.settings.get(name) for each in (self, now))
            # A checkpoint may be moved.
            both = _is_checkpoint(was) and _is_checkpoint(now_is)
            if (was["content"] == now_is["content"]) if both else (was == now_is):
                continue
            difference = f"{name} was {_shown(was)} and is {_shown(now_is)}"
            if name == "batch_size":
                # Kept after a batch that was too large.
                log.warning(f"{difference}: scores may differ in last digits; {COSTS} stays")
                continue
            differences.append(difference)
        if not differences and self.digests != now.digests:
            others = f"{now.count} others of {now.source}"
            differences = [f"the {self.count} inputs of {self.source} are now {others}"]
        if differences:
            raise InputError(
                f"{directory} was started with other settings ({'; '.join(differences)}): give "
                "the same again, another --output_dir, or --overwrite to start over"
            )


def read_manifest(directory: Path) -> Manifest | None:
    """Reads a directory's manifest; None if absent, ``InputError`` if it cannot be read."""
    path = directory / MANIFEST
    kinds = OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError
    remedy = "give another --output_dir, or --overwrite"
    with as_input_error(f"{path} is not a manifest of this release", remedy, *kinds):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        if {name: values.pop(name) for name in _HEADER} != _HEADER:
            raise ValueError("another format")
        return Manifest(**values)


def start(directory: Path, now: Manifest, *, overwrite: bool) -> None:
    """Writes the manifest ``now`` of a new run; raises ``InputError`` if a run to resume differs.

    ``overwrite`` deletes an earlier run first. No other process may write to the directory.
    """
    atomic.remove_unfinished(directory)
    if overwrite:
        # The manifest is deleted last, so that no answer is ever without it.
        for name in (*sorted(_answers(directory)), MANIFEST):
            (directory / name).unlink(missing_ok=True)
    if not _answers(directory):
        # A run that wrote no shard may start again with other settings, and other costs.
        (directory / COSTS).unlink(missing_ok=True)
        values = _HEADER | dataclasses.asdict(now)
        write(directory / MANIFEST, [json.dumps(values, indent=1).encode() + b"\n"], MANIFEST)
        return
    before = read_manifest(directory)
    if before is None:
        raise InputError(
            f"{directory} holds predictions and no {MANIFEST}: give another --output_dir, or "
            "--overwrite to start over"
        )
    before.check_same(now, directory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """Files of a run's answers, one for each shard, numbered from 0."""

    directory: Path
    # Number of all inputs, and of the inputs in each shard but the last.
    total: int
    size: int

    @property
    def count(self) -> int:
        """Number of shards."""
        return -(-self.total // self.size)

    @property
    def merged(self) -> Path:
        """Path of the file that ``merge`` writes."""
        return self.directory / MERGED

    def path(self, shard: int) -> Path:
        """Returns the path of a shard, such as ``predictions-00003-of-00017.jsonl``."""
        return self.directory / f"predictions-{shard:05}-of-{self.count:05}.jsonl"

    def indices(self, shard: int) -> range:
        """Returns the positions of a shard's inputs among all inputs."""
        return range(shard * self.size, min((shard + 1) * self.size, self.total))

    def unfinished(self) -> list[int]:
        """Returns the numbers of the missing shards, in order.

        There are none once ``merged`` exists, since a user may then delete the shards.
        """
        there = _answers(self.directory)
        if MERGED in there:
            return []
        return [shard for shard in range(self.count) if self.path(shard).name not in there]

    def write(self, shard: int, lines: list[bytes]) -> None:
        """Writes the file of a shard, whole or not at all."""
        path = self.path(shard)
        write(path, lines, f"shard {shard} of {self.count} ({path.name})")

    def merge(self) -> None:
        """Writes the lines of all shards to ``merged``; no other worker may be writing."""
        atomic.remove_unfinished(self.directory)
        write(self.merged, self.lines(), f"{MERGED}, the {self.count} shards in one file")

    def lines(self) -> Iterator[bytes]:
        """Yields the line of each input, in order, from ``merged`` or else from the shards."""
        if self.merged.exists():
            yield from _lines(self.merged, range(self.total))
            return
        for shard in range(self.count):
            yield from _lines(self.path(shard), self.indices(shard))


def write(path: Path, lines: Iterable[bytes], what: str) -> None:
    """Writes a file whole or not at all; raises ``InputError``, with ``what``, if it cannot."""
    try:
        atomic.write_whole(path, lines)
    except OSError as error:
        remedy = "free some space" if error.errno in _FULL else "check the directory"
        raise InputError(
            f"cannot write {what} to {path.parent} ({error.strerror}): {remedy} and give the same "
            "command again (without --overwrite), which resumes after the finished shards"
        ) from error


def _answers(directory: Path) -> set[str]:
    """Returns the names of the shards and of ``MERGED`` that exist in a directory."""
    names = {entry.name for entry in os.scandir(directory)}
    return {name for name in names if name == MERGED or _SHARD.fullmatch(name)}


def _lines(path: Path, indices: range) -> Iterator[bytes]:
    """Yields a file's lines; raises ``InputError`` if they are not the answers at ``indices``."""
    with path.open("rb") as file:
        for index, line in itertools.zip_longest(indices, file):
            start = b'{"index": %d, ' % (-1 if index is None else index)
            if line is None or not (line.startswith(start) and line.endswith(b"}\n")):
                raise InputError(
                    f"{path} has changed since it was written: delete it and repeat the command"
                )
            yield line


def _shown(value: Any) -> str:
    if not _is_checkpoint(value):
        return json.dumps(value, ensure_ascii=False)
    return f"{value['name']} ({value['content'] and value['content'][:12]})"


def _is_checkpoint(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"name", "content"}
