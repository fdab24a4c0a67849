"""What a run found, a line of JSON for each time that it looked."""

import json
import os
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError


class MetricsFile:
    """``metrics.jsonl``: each line has a ``step``, and no step is told of twice.

    A run that was killed goes on from a checkpoint, and takes again the steps that came
    after: their lines are cut off. What it says again of the checkpoint's own step is there.
    """

    def __init__(self, path: Path, start_step: int):
        """Opens the file of a run that goes on after ``start_step`` steps."""
        self._path = path
        kept = _lines_up_to(path, start_step) if path.is_file() else []
        self._said = {line for line in kept if json.loads(line).get("step") == start_step}
        if kept:
            # Aside and renamed: a kill leaves the old file or the new one.
            aside = path.with_suffix(".unfinished")
            aside.write_text("".join(kept), encoding="utf-8")
            os.replace(aside, path)
        else:
            path.unlink(missing_ok=True)

    def add(self, **values: Any) -> None:
        """Adds a line.

        Raises:
            InputError: it cannot be written.
        """
        line = json.dumps(values) + "\n"
        if line in self._said:
            return
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(line)
        except OSError as error:
            raise InputError(
                f"{self._path} cannot be written: {error.strerror}: make room, and run the same "
                "command again to go on from the newest checkpoint"
            ) from error


def _lines_up_to(path: Path, step: int) -> list[str]:
    """The whole lines of the file that tell of no later step."""
    with path.open(encoding="utf-8") as stream:
        # The last may have been cut short.
        lines = [line for line in stream if line.endswith("\n")]
    return [line for line in lines if json.loads(line).get("step", 0) <= step]
