"""Inputs as a stream, of which one shard is in memory at a time.

A source is read twice, first to count and fingerprint the inputs, then to decode them, so that it
must give the same bytes each time.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from spec_t5x.data.text_files import is_gzip, is_jsonl, json_object, raw_lines, text_of
from spec_t5x.errors import InputError

# Fields of a JSON line that may hold its text, in order.
TEXT_FIELDS = ("inputs", "input", "text")
# T5X's name for an input's text in its files of predictions.
PRETOKENIZED = "inputs_pretokenized"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One input, or its error."""

    # Position among all inputs, from 0.
    index: int
    # Name of the position for a user: ("line", 1).
    place: tuple[str, int]
    text: str = ""
    # Ids that the source made itself; None leaves that to the model's vocabulary.
    ids: list[int] | None = None
    # Further fields for the output.
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Name of its seqio task.
    task: str | None = None
    error: str | None = None


@runtime_checkable
class Source(Protocol):
    """A stream of inputs."""

    @property
    def name(self) -> str:
        """Name for messages and the manifest."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that decide the inputs, as JSON holds them, for the manifest."""

    def raw(self) -> Iterator[bytes]:
        """Yields each input's bytes, in order; the same each time."""

    def item(self, index: int, raw: bytes) -> Item:
        """Makes the input at ``index`` from its bytes; never raises."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSource:
    """A file: JSON lines, or a text on each line."""

    path: Path
    jsonl: bool
    field: str | None = None

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self.path)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that decide how lines are read, for the manifest."""
        return {"jsonl": self.jsonl, "field": self.field}

    def raw(self) -> Iterator[bytes]:
        """Yields the lines of the file (``text_files.raw_lines``)."""
        return raw_lines(self.path)

    def item(self, index: int, raw: bytes) -> Item:
        """Makes the input of a line; the input holds the error of a line that cannot be read."""
        item = Item(index=index, place=("line", index + 1))
        try:
            text, fields = self._read(raw)
        except InputError as error:
            return dataclasses.replace(item, error=str(error))
        return dataclasses.replace(item, text=text, fields=fields)

    def _read(self, raw: bytes) -> tuple[str, dict[str, Any]]:
        """Parses the text and fields of a line, the text's field under T5X's name."""
        line = text_of(raw)
        if not line.strip():
            raise InputError("the line is empty: give at least one word")
        if not self.jsonl:
            return line, {PRETOKENIZED: line}
        values = json_object(line)
        names = TEXT_FIELDS if self.field is None else (self.field,)
        name = next((name for name in names if name in values), None)
        if name is None:
            raise InputError(
                f"no field {' or '.join(map(repr, names))} (there are {sorted(values)[:6]}): fix "
                "the line, or name its field with --field"
            )
        text = values.pop(name)
        if not isinstance(text, str):
            raise InputError(f"field {name!r} is {repr(text)[:40]}, not a text: fix the line")
        # The text's name is first, and no other field's.
        return text, {PRETOKENIZED: text} | values | {PRETOKENIZED: text}


def file_source(path: str, field: str | None = None) -> FileSource:
    """Opens a file as a source.

    Args:
      path: of text lines, or of JSON lines (.jsonl, .json, .ndjson); gzipped or not.
      field: of a JSON line; naming one makes any file JSON lines.
    """
    found = Path(path).expanduser()
    is_gzip(found)  # checks that it is there
    return FileSource(path=found, jsonl=is_jsonl(path) or field is not None, field=field)


def no_inputs(name: str) -> InputError:
    """Makes the error of a source without inputs."""
    return InputError(f"{name} holds no inputs: give at least one")


def survey(
    source: Source, shard_size: int, progress: Callable[[int], None] = lambda count: None
) -> tuple[int, list[str]]:
    """Counts the inputs and digests each shard; reads the source to its end."""
    count, digests, raws = 0, [], source.raw()
    while shard := list(itertools.islice(raws, shard_size)):
        count += len(shard)
        digests.append(digest(shard))
        progress(count)
    if not count:
        raise no_inputs(source.name)
    return count, digests


def digest(raws: Iterable[bytes]) -> str:
    """Returns the SHA-256 (hex) of some inputs' bytes."""
    total = hashlib.sha256()
    for raw in raws:
        total.update(raw)
    return total.hexdigest()


def read_shards(
    source: Source, shard_size: int, wanted: Sequence[int]
) -> Iterator[tuple[int, list[bytes]]]:
    """Yields the number and inputs of each wanted shard; ``wanted`` is in increasing order.

    Other shards are skipped, and nothing after the last is read.
    """
    raws, at = source.raw(), 0
    for shard in wanted:
        start = shard * shard_size
        yield shard, list(itertools.islice(raws, start - at, start - at + shard_size))
        at = start + shard_size
