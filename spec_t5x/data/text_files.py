"""Lines of text files, gzipped or not: the bytes, the text of a line, a line's JSON object.

``text_of`` and ``json_object`` parse one line, and their errors name no file or line number:
readers of training data add these and stop, bulk inference reports the error for that input.
"""

import codecs
import gzip
import io
import json
import math
import queue
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError, as_input_error
from spec_t5x.machine.paths import expanded

_GZIP_MAGIC = b"\x1f\x8b"
# Levels of a JSON line; Python's writer allows fewer where more functions have called it.
_MOST_LEVELS = 100
# Most lines of a group, and read ahead of it; seconds to wait for lines that were written together.
_READ_AHEAD = 4096
_TOGETHER = 0.02
_JSON_SUFFIXES = (".jsonl", ".jsonlines", ".json", ".ndjson")


def is_jsonl(path: str | Path) -> bool:
    """Says whether a file's name, without ``.gz`` and in lower case, is that of JSON lines."""
    return str(path).lower().removesuffix(".gz").endswith(_JSON_SUFFIXES)


def raw_lines(path: str | Path) -> Iterator[bytes]:
    """Yields the lines of a file, line ends included, decompressed if the file is gzip.

    Raises ``InputError`` if the file is absent, cannot be read, is cut short, or is UTF-16.
    """
    with opened(path) as stream:
        yield from stream_lines(stream, str(path))


def stream_lines(stream: io.BufferedIOBase, name: str) -> Iterator[bytes]:
    """Yields the lines of a stream as ``raw_lines`` does; its errors call the stream ``name``."""
    if not isinstance(stream, io.BufferedReader):
        stream = io.BufferedReader(stream)
    number = 0
    try:
        lines = gzip.GzipFile(fileobj=stream) if holds_gzip(stream) else stream
        if lines.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise InputError(f"{name} is UTF-16 or UTF-32: convert it to UTF-8, as by iconv")
        for number, line in enumerate(lines, start=1):  # noqa: B007, the error names it
            yield line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot read {name} after line {number} ({reason}): give a complete file"
        ) from error


def arriving(stream: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yields the lines of a stream in groups, so that they are answered before the stream ends.

    Raises the stream's ``Exception`` after the lines before it.
    """
    # None marks the end of the stream.
    waiting: queue.Queue[bytes | Exception | None] = queue.Queue(maxsize=_READ_AHEAD)

    def read() -> None:
        try:
            for line in stream:
                waiting.put(line)
            waiting.put(None)
        except Exception as error:
            waiting.put(error)

    threading.Thread(target=read, daemon=True).start()
    part: list[bytes] = []
    while isinstance(line := waiting.get(), bytes):
        if not part:
            # Waits, because lines that are written together may arrive one by one.
            time.sleep(_TOGETHER)
        part.append(line)
        if waiting.empty() or len(part) == _READ_AHEAD:
            yield part
            part = []
    if part:
        yield part
    if line is not None:
        raise line


def opened(path: str | Path) -> io.BufferedReader:
    """Opens a file of bytes; raises ``InputError`` if it is absent, no file or not readable."""
    path = expanded(path)
    with as_input_error(f"cannot open {path}", "give a file that you may read", OSError):
        if not path.exists():
            raise InputError(f"no file {path}: give the path of a text file (it may be gzipped)")
        if not path.is_file():
            what = "a folder" if path.is_dir() else "a pipe or a device, which is read once"
            raise InputError(f"{path} is {what}: give a file")
        return path.open("rb")


def holds_gzip(stream: io.BufferedReader) -> bool:
    """Says whether the stream continues with gzip's magic bytes, without consuming them."""
    return stream.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)


def text_of(line: bytes) -> str:
    """Returns the text of a line, without its line end and without a byte order mark.

    Raises ``InputError`` if the line is not UTF-8.
    """
    line = line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte {error.start + 1} is 0x{line[error.start]:02x}, not UTF-8: convert the file "
            "(iconv -t utf-8), or fix the line"
        ) from error


def json_object(line: str) -> dict[str, Any]:
    """Parses a line that is a JSON object.

    Raises ``InputError`` if it is not, has a number that is not finite (1e999) or is nested deeply.
    """
    with as_input_error("not JSON", "fix the line", ValueError, RecursionError):
        values = json.loads(line, parse_constant=_finite, parse_float=_finite)
    if not isinstance(values, dict):
        raise InputError(f"{line.strip()[:40]!r} is not a JSON object: fix the line")
    level = [values]
    for _ in range(_MOST_LEVELS):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [one for each in inner for one in each if isinstance(one, dict | list)]
        if not level:
            return values
    raise InputError(f"a value is nested over {_MOST_LEVELS} levels deep: fix the line")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


def json_line(values: Any) -> str:
    """Returns a value as one line of JSON, without line end, that UTF-8 can encode."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which UTF-8 cannot encode, becomes JSON's escape, which is Python's.
    return text.encode(errors="backslashreplace").decode()
