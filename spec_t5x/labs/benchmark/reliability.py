"""Unreliable timings: other programs used the processors, or the speed-up exceeds its bound.

A row is a measurement as values of JSON. ``beside`` is the share of the processors that other
programs used while it was timed, from 0 to 1; ``noise`` is ``Comparison.is_noise``. Both are
optional: a row without times, or from before they were recorded, lacks them.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

# The share ``beside`` above which a timing is unreliable.
MUCH = 0.15

Row = Mapping[str, Any]


class OtherPrograms:
    """Meter of the processor time that other programs use, from the meter's creation on."""

    def __init__(self):
        self._began, self._used = time.monotonic(), _used_by_others()

    @property
    def share(self) -> float:
        """Share of all processors' time so far that other programs used, from 0 to 1."""
        seconds = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        return min(max((_used_by_others() - self._used) / max(seconds, 1e-9), 0.0), 1.0)


def _used_by_others() -> float:
    """Returns the processor seconds of all but this process since the machine started."""
    times = psutil.cpu_times()
    # Not every platform counts low-priority programs (nice) and other guests (steal).
    busy = times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "steal", 0.0)
    return busy - time.process_time()


def doubt(row: Row) -> str | None:
    """Returns why a row's timing is unreliable, as a table's cell, or None if it is reliable.

    >>> doubt({"beside": 0.45, "noise": True}), doubt({"beside": 0.02, "noise": False})
    ('others 45%, noise', None)
    """
    found = [f"others {row['beside']:.0%}"] if row.get("beside", 0.0) > MUCH else []
    return ", ".join(found + ["noise"] * bool(row.get("noise"))) or None


def caution(rows: Sequence[Row]) -> str | None:
    """Returns a warning about the unreliable rows of a table, or None if there are none.

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
