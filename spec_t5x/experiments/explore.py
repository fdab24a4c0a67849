"""Settings to play with in a notebook: widgets where there are any, plain calls elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any

from spec_t5x.errors import InputError


def explore(function: Callable[..., None], **choices: Sequence[Any]) -> None:
    """Calls ``function`` with the first choice of each setting, and again at every change.

    Where ipywidgets is installed, a menu for each setting appears above the output. Where
    it is not, the call is made once and the choices are printed, to be called by hand.

    Args:
      function: prints what is to be seen.
      **choices: of each of its arguments, the values to choose from.

    Raises:
      InputError: a setting without choices.
    """
    for name, values in choices.items():
        if not values:
            raise InputError(f"{name} has no choices: give at least one value")
    try:
        from ipywidgets import Dropdown, interact
    except ImportError:
        print("ipywidgets is not installed, so call the function yourself, with any of:")
        for name, values in choices.items():
            print(f"  {name}: {', '.join(map(repr, values))}")
        function(**{name: values[0] for name, values in choices.items()})
        return
    interact(function, **{name: Dropdown(options=list(values)) for name, values in choices.items()})
