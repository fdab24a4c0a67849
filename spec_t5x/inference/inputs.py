"""Inputs as streams: lines of text or of JSON, gzipped or not, one shard in memory.

A source is read through twice, first to count and to fingerprint it, then to decode it;
so it must say the same each time.
"""

import dataclasses
import gzip
import hashlib
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from spec_t5x.errors import InputError

# Where the text of a JSON line is, unless its field is named.
TEXT_FIELDS = ("inputs", "input", "text")
# T5X's name for an input's text in its files of predictions.
PRETOKENIZED = "inputs_pretokenized"
_JSONL = (".jsonl", ".json", ".ndjson")
_BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One input, or why it is none."""

    # Its place among all inputs, from 0.
    index: int
    # What a person calls that place: ("line", 1).
    place: tuple[str, int]
    text: str = ""
    # Ids that the source made itself; None leaves that to the model's vocabulary.
    ids: list[int] | None = None
    # All else that the source says of it, for the output.
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The seqio task that it is from.
    task: str | None = None
    error: str | None = None


@runtime_checkable
class Source(Protocol):
    """A stream of inputs."""

    @property
    def name(self) -> str:
        """For messages and the manifest."""

    @property
    def settings(self) -> dict[str, Any]:
        """What else decides what the inputs are, as JSON holds it, for the manifest."""

    def raw(self) -> Iterator[bytes]:
        """Each input's bytes, in order; the same each time.

        Raises:
          InputError: it cannot be read.
        """

    def item(self, index: int, raw: bytes) -> Item:
        """What the bytes of the input at ``index`` say. Never raises."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSource:
    """A file: JSON lines, or a text on each line."""

    path: Path
    jsonl: bool
    field: str | None = None

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def settings(self) -> dict[str, Any]:
        """How lines are read."""
        return {"jsonl": self.jsonl, "field": self.field}

    def raw(self) -> Iterator[bytes]:
        """Each line with its end.

        Raises:
          InputError: the file is absent, or damaged gzip.
        """
        count = 0
        try:
            with _open(self.path) as lines:
                for count, line in enumerate(lines, 1):  # noqa: B007, the error names it
                    yield line
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"cannot read {self.path} after line {count} ({reason}): give a whole text file, "
                "JSON lines, or one of them gzipped"
            ) from error

    def item(self, index: int, raw: bytes) -> Item:
        """The line at ``index``."""
        place = ("line", index + 1)
        line = (raw.removeprefix(_BOM) if index == 0 else raw).rstrip(b"\r\n")
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f"byte {line[error.start]:#04x} at column {error.start + 1} is no UTF-8"
            return Item(index=index, place=place, error=f"{reason}: mend the line")
        if not text.strip():
            return Item(index=index, place=place, error="the line is empty: give at least one word")
        if not self.jsonl:
            return Item(index=index, place=place, text=text, fields={PRETOKENIZED: text})
        try:
            text, fields = _read_object(text, self.field)
        except InputError as error:
            return Item(index=index, place=place, error=str(error))
        return Item(index=index, place=place, text=text, fields=fields)


def file_source(path: str, file_format: str = "auto", field: str | None = None) -> FileSource:
    """The source for a file.

    Args:
      path: gzip is told by the content.
      file_format: "jsonl", "text", or "auto" to go by the name (.jsonl, .json, .ndjson).
      field: of a JSON line; naming one makes the file JSON lines.

    Raises:
      InputError: there is no such file.
    """
    found = Path(path).expanduser()
    if not found.is_file():
        raise InputError(f"no file {path}: give --input a text file or JSON lines")
    by_name = path.removesuffix(".gz").endswith(_JSONL) or field is not None
    jsonl = by_name if file_format == "auto" else file_format == "jsonl"
    return FileSource(path=found, jsonl=jsonl, field=field)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """What the first reading found."""

    # Number of inputs.
    count: int
    # Of the bytes of each shard: SHA-256, in hex.
    digests: list[str]

    @property
    def digest(self) -> str:
        """Of all inputs."""
        return digest(part.encode() for part in self.digests)


def survey(
    source: Source, shard_size: int, progress: Callable[[int], None] = lambda count: None
) -> Survey:
    """Reads a source through; ``progress`` hears the number of inputs so far.

    Raises:
      InputError: it cannot be read, or holds nothing.
    """
    count, digests, raws = 0, [], source.raw()
    while shard := list(itertools.islice(raws, shard_size)):
        count += len(shard)
        digests.append(digest(shard))
        progress(count)
    if not count:
        raise InputError(f"{source.name} holds no inputs: give at least one")
    return Survey(count=count, digests=digests)


def digest(raws) -> str:
    """SHA-256 (hex) of some inputs' bytes."""
    total = hashlib.sha256()
    for raw in raws:
        total.update(raw)
    return total.hexdigest()


def read_shards(
    source: Source, shard_size: int, wanted: Sequence[int]
) -> Iterator[tuple[int, list[bytes]]]:
    """Each wanted shard's number and inputs, in order; ``wanted`` is in order too.

    What lies between is read past, and nothing is read behind the last.
    """
    raws, at = source.raw(), 0
    for shard in wanted:
        start = shard * shard_size
        yield shard, list(itertools.islice(raws, start - at, start - at + shard_size))
        at = start + shard_size


def _open(path: Path):
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    return gzip.open(path, "rb") if is_gzip else path.open("rb")


def _read_object(line: str, field: str | None) -> tuple[str, dict[str, Any]]:
    """Text and fields of a JSON line, the text's field under T5X's name."""
    try:
        values = json.loads(line, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"no JSON ({reason}): mend the line") from error
    if not isinstance(values, dict):
        raise InputError(f"{line.strip()[:40]!r} is no JSON object: mend the line")
    names = TEXT_FIELDS if field is None else (field,)
    name = next((name for name in names if name in values), None)
    if name is None:
        raise InputError(
            f"no field {' or '.join(map(repr, names))} (there are {sorted(values)[:6]}): mend the "
            "line, or name its field with --field"
        )
    text = values.pop(name)
    if not isinstance(text, str):
        raise InputError(f"field {name!r} is {repr(text)[:40]}, no text: mend the line")
    return text, {PRETOKENIZED: text} | values


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is larger than any number")
    return value


def _refuse_constant(name: str):
    raise ValueError(f"{name} is no number of JSON's")
