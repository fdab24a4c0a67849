"""Stop strings, texts at which an output ends before its end of sequence."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

# The character that a tokenizer decodes an incomplete sequence of bytes to.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Stopped(NamedTuple):
    """The end of an output at a stop string."""

    # Number of new ids, up to and with the one that completed a stop string.
    count: int
    # Decoded output before the stop string, or before the first of several.
    text: str


def first_stop(
    decode: Callable[[list[int]], str],
    ids: Sequence[int],
    new: Sequence[int],
    stop: Sequence[str],
    given: int = 0,
) -> Stopped | None:
    """Returns where ``new`` ids, added to ``ids`` one by one, complete a stop string, or None.

    The first ``given`` ids are a prefix, in which a stop string may begin, but not end.
    """
    start = len(decode(list(ids[:given]))) if stop and given else 0
    for count in range(1, len(new) + 1 if stop else 0):
        text = decode([*ids, *new[:count]])
        found = [text.find(string, max(start - len(string) + 1, 0)) for string in stop]
        if places := [place for place in found if place >= 0]:
            return Stopped(count, text[: min(places)])
    return None


def settled(text: str, stop: Sequence[str]) -> str:
    """Returns an unfinished text without an incomplete character or stop string at its end.

    >>> settled("Wo ist der Bahnhof?\\n", ["\\n\\n"])
    'Wo ist der Bahnhof?'
    """
    text = text.rstrip(_UNFINISHED)
    begun = (n for string in stop for n in range(1, len(string)) if text.endswith(string[:n]))
    return text[: len(text) - max(begun, default=0)]
