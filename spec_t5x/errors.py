"""The one exception type for mistakes that the user can fix.

Every message is one line that holds the offending value and the remedy, raised before any
compilation or download. The command line prints it and exits with status 2; library users can
catch it as the ``ValueError`` that it is.
"""

import difflib
import numbers
from collections.abc import Collection, Iterable
from typing import Any


class InputError(ValueError):
    """An argument, file or checkpoint that cannot be used as it is."""


def check_at_least(settings: Any, **least: int) -> None:
    """Raises ``InputError`` unless fields of ``settings`` are None or integers of at least this."""
    for name, number in least.items():
        check_numbers(number, **{name: getattr(settings, name)})


def check_numbers(least: int, **values: Any) -> None:
    """Raises ``InputError`` unless each value is None or an integer of at least ``least``."""
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, numbers.Integral):
            raise InputError(f"{name} is {value!r}: give a whole number of at least {least}")
        if value < least:
            raise InputError(f"{name} is {value}: give at least {least}")


def as_lists(options: Any, **least: int) -> None:
    """Makes these fields of a frozen dataclass tuples, of gin's sequences too.

    Raises:
      InputError: a value that is no list, or has fewer elements than its least, 0 or 1.
    """
    for name, number in least.items():
        value = getattr(options, name)
        if not isinstance(value, tuple | list):
            raise InputError(f"{name} is {value!r}: give a list, as in ({value!r},)")
        if len(value) < number:
            raise InputError(f"{name} is empty: give at least one")
        object.__setattr__(options, name, tuple(value))


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raises ``InputError`` for a value that is none of the choices."""
    # A list of them, since a value may have no hash.
    if value not in list(choices):
        raise InputError(f"{name} is {value!r}: choose one of {', '.join(choices)}")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns a hint, ", did you mean 'the likeliest'?", empty if no choice is similar."""
    similar = difflib.get_close_matches(word, choices, n=1)
    return f", did you mean {similar[0]!r}?" if similar else ""
