"""Timings that are not to be relied on: those beside other programs, and what is noise.

A row is what a measurement gives as JSON. Its ``beside`` is the share of the processors that other
programs used while it was timed, from 0 to 1; its ``noise`` says that the speed-up is above all
that drafts can bring. A row without them was timed before they were recorded, or has no times.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spec_t5x.machine.other_programs import MUCH

Row = Mapping[str, Any]


def doubt(row: Row) -> str | None:
    """A cell of a table: why a row is not to be relied on; None where it is.

    >>> doubt({"beside": 0.45, "noise": True}), doubt({"beside": 0.02, "noise": False})
    ('others 45%, noise', None)
    """
    found = [f"others {row['beside']:.0%}"] if _beside(row) else []
    return ", ".join(found + ["noise"] * bool(row.get("noise"))) or None


def caution(rows: Sequence[Row]) -> str | None:
    """The line below a table of such rows; None where all are to be relied on.

    >>> caution([{"beside": 0.45}])
    'Not to be relied on: other programs used 45% of the processors. Measure again without them.'
    """
    busy = [row["beside"] for row in rows if _beside(row)]
    noisy = sum(bool(row.get("noise")) for row in rows)
    reasons = []
    if busy:
        most = f"{'up to ' * (len(busy) > 1)}{max(busy):.0%}"
        reasons.append(f"other programs used {most} of the processors{_how_many(len(busy), rows)}")
    if noisy:
        where = _how_many(noisy, rows)
        reasons.append(f"a speed-up above the block efficiency is noise{where}")
    if not reasons:
        return None
    remedy = "without them" if busy else "with more repeats, or on a quiet machine"
    return f"Not to be relied on: {'; '.join(reasons)}. Measure again {remedy}."


def _beside(row: Row) -> bool:
    return row.get("beside", 0.0) > MUCH


def _how_many(count: int, rows: Sequence[Row]) -> str:
    return f" ({count} of {len(rows)} rows)" if len(rows) > 1 else ""
