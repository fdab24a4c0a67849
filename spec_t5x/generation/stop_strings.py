"""The end of an output at a text that it contains, before its end of sequence."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

# The character that a decoder shows for one whose last bytes are to come.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Stopped(NamedTuple):
    """The place at which the first stop string was completed."""

    # The number of new ids, up to the one that completed it.
    count: int
    # The text before it.
    text: str


def first_stop(
    decode: Callable[[list[int]], str],
    ids: Sequence[int],
    new: Sequence[int],
    stop: Sequence[str],
) -> Stopped | None:
    """Finds where ``new`` ids after ``ids`` complete the first stop string; None if nowhere."""
    for count in range(1, len(new) + 1 if stop else 0):
        text = decode([*ids, *new[:count]])
        if places := [text.index(string) for string in stop if string in text]:
            return Stopped(count, text[: min(places)])
    return None


def settled(text: str, stop: Sequence[str]) -> str:
    """Returns the part of an unfinished output that later tokens cannot change.

    >>> settled("Wo ist der Bahnhof?\\n", ["\\n\\n"])
    'Wo ist der Bahnhof?'
    """
    text = text.rstrip(_UNFINISHED)
    begun = (n for string in stop for n in range(1, len(string)) if text.endswith(string[:n]))
    return text[: len(text) - max(begun, default=0)]
