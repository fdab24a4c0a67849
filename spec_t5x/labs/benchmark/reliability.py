"""Timings that are not to be relied on: those beside other programs, and those that are noise.

A row is a measurement as JSON holds it. Its ``beside`` is the share of the processors that other
programs used while it was timed, from 0 to 1; its ``noise`` is true if the speed-up is above what
drafts can bring. Rows without them were timed before they were recorded, or have no times.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

# The share from which timings are not to be relied on.
MUCH = 0.15

Row = Mapping[str, Any]


class OtherPrograms:
    """Count of the processors' time that other programs use, from its creation on."""

    def __init__(self):
        self._began, self._used = time.monotonic(), _used_by_others()

    @property
    def share(self) -> float:
        """Part of all processors' time that others have used, from 0 to 1."""
        seconds = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        return min(max((_used_by_others() - self._used) / max(seconds, 1e-9), 0.0), 1.0)


def _used_by_others() -> float:
    """Returns seconds of processors since the machine started."""
    times = psutil.cpu_times()
    # Not every platform counts low priority and other guests.
    busy = times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "steal", 0.0)
    return busy - time.process_time()


def doubt(row: Row) -> str | None:
    """Returns a table's cell, the reason why a row is not to be relied on; None where it is.

    >>> doubt({"beside": 0.45, "noise": True}), doubt({"beside": 0.02, "noise": False})
    ('others 45%, noise', None)
    """
    found = [f"others {row['beside']:.0%}"] if row.get("beside", 0.0) > MUCH else []
    return ", ".join(found + ["noise"] * bool(row.get("noise"))) or None


def caution(rows: Sequence[Row]) -> str | None:
    """Returns the line below a table of rows; None where all are to be relied on.

    >>> caution([{"beside": 0.45}, {"beside": 0.01}])
    'Not to be relied on (1 of 2 rows): other programs used up to 45% of the processors.'
    """
    doubtful = sum(doubt(row) is not None for row in rows)
    if not doubtful:
        return None
    where = f" ({doubtful} of {len(rows)} rows)" if len(rows) > 1 else ""
    reason = "a speed-up above the block efficiency is noise"
    if (busiest := max(row.get("beside", 0.0) for row in rows)) > MUCH:
        reason = f"other programs used up to {busiest:.0%} of the processors"
    return f"Not to be relied on{where}: {reason}."
