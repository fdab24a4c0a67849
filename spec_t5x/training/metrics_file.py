"""The log of a run: a line of JSON for each report."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError
from spec_t5x.machine.atomic import write_whole


class MetricsFile:
    """``metrics.jsonl``: each line has a ``step``, and no line is there twice.

    A run that was killed resumes from a checkpoint, and takes again the steps that came after:
    their lines are removed. Lines about the checkpoint's own step are not added again.
    """

    def __init__(self, path: Path, start_step: int):
        """Opens the file of a run that resumes after ``start_step`` steps.

        Raises:
            InputError: it cannot be written, or one of its lines is broken.
        """
        self._path = path
        with self._writing():
            lines = _lines_with_steps(path) if path.is_file() else []
            kept = [line for line, step in lines if step <= start_step]
            self._written = {line.decode() for line, step in lines if step == start_step}
            if kept:
                write_whole(path, kept)
            else:
                path.unlink(missing_ok=True)

    def add(self, **values: Any) -> None:
        """Adds a line.

        Raises:
            InputError: it cannot be written.
        """
        line = json.dumps(values) + "\n"
        if line in self._written:
            return
        with self._writing(), self._path.open("a", encoding="utf-8") as stream:
            stream.write(line)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot write {self._path}: {error.strerror}: free some space and run the same "
                "command again to resume from the newest checkpoint"
            ) from error


def _lines_with_steps(path: Path) -> list[tuple[bytes, int]]:
    """The whole lines of the file, each with its step."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [
        (line, _step(line, f"line {number} of {path}"))
        for number, line in enumerate(lines, start=1)
        # The last may have been cut short.
        if line.endswith(b"\n")
    ]


def _step(line: bytes, where: str) -> int:
    try:
        return json.loads(line.decode()).get("step", 0)
    except (ValueError, AttributeError) as error:
        shown = line[:40].decode(errors="replace").strip()
        raise InputError(
            f"{where} is {shown!r}, no JSON object: delete the line and run the same command "
            "again to resume from the newest checkpoint"
        ) from error
