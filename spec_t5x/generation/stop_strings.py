"""Where an output ends because of what it says, and not by its end of sequence."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

# What a decoder shows of a character whose last bytes are still to come.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Stopped(NamedTuple):
    """Where the first stop string was completed."""

    # Of the new ids, those up to the one that completed it.
    count: int
    # What stands before it.
    text: str


def first_stop(
    decode: Callable[[list[int]], str],
    ids: Sequence[int],
    new: Sequence[int],
    stop: Sequence[str],
) -> Stopped | None:
    """Where ``new`` ids after ``ids`` complete the first of the stop strings; None if nowhere."""
    for count in range(1, len(new) + 1 if stop else 0):
        text = decode([*ids, *new[:count]])
        if places := [text.index(string) for string in stop if string in text]:
            return Stopped(count, text[: min(places)])
    return None


def settled(text: str, stop: Sequence[str]) -> str:
    """An output under way, without what may still change at its end.

    >>> settled("Wo ist der Bahnhof?\\n", ["\\n\\n"])
    'Wo ist der Bahnhof?'
    """
    text = text.rstrip(_UNFINISHED)
    begun = (n for string in stop for n in range(1, len(string)) if text.endswith(string[:n]))
    return text[: len(text) - max(begun, default=0)]
