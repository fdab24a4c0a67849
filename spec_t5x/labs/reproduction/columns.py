"""Columns of the report's tables: what stands in them, and how it came about."""

import enum
from functools import partial
from typing import NamedTuple


class Origin(enum.StrEnum):
    """How a number came about; the report says it for every column and figure."""

    CLOSED_FORM = "closed form"
    MEASURED = "measured here"
    COMPILED = "compiled for TPU-v4"
    PAPER = "the paper's"
    # A row's name, a setting.
    LABEL = ""


class Column(NamedTuple):
    """A column of a table."""

    origin: Origin
    # Of the value in each row; None or absent is an empty cell.
    key: str
    title: str
    # Of numbers, for ``format``; strings stay as they are.
    format: str = ".2f"


def label(key: str, title: str | None = None, format: str = "g") -> Column:
    """A column of names or settings."""
    return Column(Origin.LABEL, key, title or key, format)


closed_form = partial(Column, Origin.CLOSED_FORM)
measured = partial(Column, Origin.MEASURED)
compiled = partial(Column, Origin.COMPILED)
paper = partial(Column, Origin.PAPER)


# Of rows of Table 2, in whatever table they stand.
SETTING = (label("task"), label("draft"), label("temperature", "temp."))
GAMMA = label("gamma", "γ")
