"""Options of trainings and benchmarks that are lists, as gin and Python give them."""

from typing import Any

from spec_t5x.errors import InputError


def as_lists(options: Any, **least: int) -> None:
    """Converts the named fields of a frozen dataclass, which may be lists, to tuples in place.

    Raises:
      InputError: a field is no list or tuple, or has fewer than ``least[NAME]`` (0 or 1) elements.
    """
    for name, number in least.items():
        value = getattr(options, name)
        if not isinstance(value, tuple | list):
            raise InputError(f"{name} is {value!r}: give a list, as in ({value!r},)")
        if len(value) < number:
            raise InputError(f"{name} is empty: give at least one")
        object.__setattr__(options, name, tuple(value))
