"""Timings that are not to be relied on: those beside other programs, and what is noise.

A row is what a measurement gives as JSON. Its ``beside`` is the share of the processors that other
programs used while it was timed, from 0 to 1; its ``noise`` is true if the speed-up is above all
that drafts can bring. A row without them was timed before they were recorded, or has no times.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spec_t5x.labs.benchmark.other_programs import MUCH

Row = Mapping[str, Any]


def doubt(row: Row) -> str | None:
    """A cell of a table: the reason why a row is not to be relied on; None where it is.

    >>> doubt({"beside": 0.45, "noise": True}), doubt({"beside": 0.02, "noise": False})
    ('others 45%, noise', None)
    """
    found = [f"others {row['beside']:.0%}"] if row.get("beside", 0.0) > MUCH else []
    return ", ".join(found + ["noise"] * bool(row.get("noise"))) or None


def caution(rows: Sequence[Row]) -> str | None:
    """The line below a table of such rows; None where all are to be relied on.

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
