"""The one exception type for mistakes that the user can fix.

Every message is one line that holds the offending value and the remedy, raised
before any compilation or download. The command line prints it and exits with
status 2; library users can catch it as the ``ValueError`` that it is.
"""

import difflib
import numbers
from collections.abc import Collection, Iterable
from typing import Any


class InputError(ValueError):
    """An argument, file or checkpoint that cannot be used as it is."""


def check_at_least(settings: Any, **least: int) -> None:
    """Raises ``InputError`` where a field of ``settings`` is no whole number or below its least.

    None is neither.
    """
    for name, number in least.items():
        value = getattr(settings, name)
        if value is None:
            continue
        if not isinstance(value, numbers.Integral):
            raise InputError(f"{name} is {value!r}: give a whole number of at least {number}")
        if value < number:
            raise InputError(f"{name} is {value}: give at least {number}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raises ``InputError`` for a value that is none of the choices."""
    if value not in choices:
        raise InputError(f"{name} is {value!r}: choose one of {', '.join(choices)}")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint for a message: ", did you mean 'the likeliest'?", empty if no choice is similar."""
    similar = difflib.get_close_matches(word, choices, n=1)
    return f", did you mean {similar[0]!r}?" if similar else ""
