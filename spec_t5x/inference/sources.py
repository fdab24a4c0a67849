"""Sources of inputs, which are read as streams of bytes, a shard at a time.

A source is read twice, first to count and digest the inputs, then to decode them, so it must give
the same bytes each time.
"""

import dataclasses
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from spec_t5x.data.text_files import is_jsonl, json_object, opened, raw_lines, text_of
from spec_t5x.errors import InputError
from spec_t5x.machine.paths import expanded

# Logs a warning once for a file.
_warn = functools.cache(logging.getLogger(__name__).warning)

# Fields of a JSON line that may hold its text; the first that exists does.
TEXT_FIELDS = ("inputs", "input", "text")
# Field of an input's text in T5X's files of predictions.
PRETOKENIZED = "inputs_pretokenized"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One input, or its error."""

    # Position among all inputs, from 0.
    index: int
    # The position as messages name it, such as ("line", 1).
    place: tuple[str, int]
    text: str = ""
    # Ids of the text, if the source has them; if None, the model's vocabulary encodes the text.
    ids: list[int] | None = None
    # Fields to repeat in the output, under ``inputs``.
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Name of the seqio task that the input is from.
    task: str | None = None
    error: str | None = None


@runtime_checkable
class Source(Protocol):
    """Stream of inputs, which can be read several times."""

    @property
    def name(self) -> str:
        """Name of the source in messages and the manifest."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the inputs depend on, as values of JSON, for the manifest."""

    def raw(self) -> Iterator[bytes]:
        """Yields each input's bytes, in order; the same each time."""

    def item(self, index: int, raw: bytes) -> Item:
        """Makes the input at ``index`` from its bytes; sets ``Item.error`` and never raises."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSource:
    """File of inputs: JSON lines, or a text on each line."""

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
        """Makes the input of a line; if the line cannot be used, sets ``Item.error``."""
        item = Item(index=index, place=("line", index + 1))
        try:
            text, fields = self._read(raw)
        except InputError as error:
            return dataclasses.replace(item, error=str(error))
        return dataclasses.replace(item, text=text, fields=fields)

    def _read(self, raw: bytes) -> tuple[str, dict[str, Any]]:
        """Returns the text of a line and its fields, among them the text by T5X's name."""
        line = text_of(raw)
        if not line.strip():
            raise InputError("the line is empty: give at least one word")
        if not self.jsonl:
            if line.startswith('{"') and line.endswith("}"):
                _warn(
                    f"{self.name} has JSON objects, which are decoded as text: --field NAME reads "
                    "a field"
                )
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
        # The text is the first field, and replaces a field that has its name.
        return text, {PRETOKENIZED: text} | values | {PRETOKENIZED: text}


def file_source(path: str, field: str | None = None) -> FileSource:
    """Returns the source of a file, gzipped or not; raises ``InputError`` if it cannot be opened.

    Lines are texts or, by ``is_jsonl`` or with a ``field`` that holds the text, JSON.
    """
    found = expanded(path)
    opened(found).close()  # raises if it is absent
    return FileSource(path=found, jsonl=is_jsonl(path) or field is not None, field=field)


def no_inputs(name: str) -> InputError:
    """Makes the error of a source that has no inputs."""
    return InputError(f"{name} holds no inputs: give at least one")


def survey(
    source: Source, shard_size: int, progress: Callable[[int], None] = lambda count: None
) -> tuple[int, list[str]]:
    """Returns the number of inputs and the shards' digests.

    Raises ``InputError`` if there are no inputs, or if all have an error.
    """
    count, digests, raws = 0, [], source.raw()
    first, usable = None, False
    while shard := list(itertools.islice(raws, shard_size)):
        if not usable:
            items = [source.item(count + place, raw) for place, raw in enumerate(shard)]
            first, usable = first or items[0], not all(item.error for item in items)
        count += len(shard)
        digests.append(digest(shard))
        progress(count)
    if not count:
        raise no_inputs(source.name)
    if not usable:
        place = " ".join(map(str, first.place))
        raise InputError(f"no input of {source.name} can be used; {place}: {first.error}")
    return count, digests


def digest(raws: Iterable[bytes]) -> str:
    """Returns the SHA-256 (hex) of the bytes of consecutive inputs."""
    return hashlib.sha256(b"".join(raws)).hexdigest()


def read_shards(
    source: Source, shard_size: int, wanted: Sequence[int]
) -> Iterator[tuple[int, list[bytes]]]:
    """Yields the number and the inputs' bytes of each shard in ``wanted``, an increasing list.

    Other shards are skipped, and nothing after the last wanted one is read.
    """
    raws, at = source.raw(), 0
    for shard in wanted:
        start = shard * shard_size
        yield shard, list(itertools.islice(raws, start - at, start - at + shard_size))
        at = start + shard_size
