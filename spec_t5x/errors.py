"""The one exception type for mistakes that the user can fix.

Every message is one line that holds the offending value and the remedy. Options are checked
before anything is downloaded or compiled. The command line prints the message and exits with
status 2; library users can catch ``ValueError``, the base class.
"""

import contextlib
import difflib
import functools
import math
import numbers
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

# Number of the process that called this first, also in its forks.
_first_process = functools.cache(os.getpid)

# Names of models, and commands that download them, by their directories in the Hub's cache.
HUB_MODELS: dict[str, tuple[str, str]] = {}


def shown(text: str) -> str:
    """Returns a message that names models as they were given, not directories of the Hub's."""
    for directory, (name, command) in HUB_MODELS.items():
        if directory in text:
            text = text.replace(directory, name)
            text = re.sub(r"copy[\w ]* again$", f"run `{command} --force-download`", text)
    return text


class InputError(ValueError):
    """Error in an option, an input, a file or a checkpoint that the user has to change."""

    def __str__(self) -> str:
        # A path or another value in the message may contain line breaks.
        return " ".join(shown(super().__str__()).splitlines())


def check_at_least(settings: Any, **least: int) -> None:
    """Raises ``InputError`` unless ``settings.NAME`` is None or an integer >= ``least[NAME]``."""
    for name, number in least.items():
        if (value := getattr(settings, name)) is not None:
            check_numbers(number, **{name: value})


def check_unused(settings: Any, why: str, *names: str) -> None:
    """Raises ``InputError``, for the reason ``why``, if a field in ``names`` is not its default."""
    for name in names:
        # The class's attribute is the field's default.
        if (value := getattr(settings, name)) != getattr(type(settings), name):
            raise InputError(f"{name} is {value!r} and {why}: leave it out")


def check_unicode(what: str, text: str) -> None:
    """Raises ``InputError`` for bytes that Python could not decode, from a pipe or a command."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} {text[:40]!r} is not UTF-8: give UTF-8 text") from error


def check_rules(repetition_penalty: float, **phrases: Collection[Sequence[int]]) -> None:
    """Raises ``InputError`` for an option of the rules of decoding that no text could follow."""
    if not 1e-30 <= repetition_penalty <= 1e30:  # Beyond, logits overflow or vanish in float32.
        raise InputError(f"repetition_penalty is {repetition_penalty}: give 1e-30 to 1e30")
    for name, texts in phrases.items():
        if not all(map(len, texts)):
            raise InputError(f"{name} has an empty list of ids: leave it out, or give ids")


def check_numbers(least: int, most: int | float = math.inf, /, **values: Any) -> None:
    """Raises ``InputError`` unless each value is an integer from ``least`` to ``most``."""
    upper = "" if most == math.inf else f", at most {most}"
    for name, value in values.items():
        if not is_number(value, numbers.Integral):
            raise InputError(f"{name} is {value!r}: give a whole number of at least {least}{upper}")
        if not least <= value <= most:
            raise InputError(f"{name} is {value}: give at least {least}{upper}")


def is_number(value: Any, kind: type = numbers.Real) -> bool:
    """Tells whether a value is a number of this kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_jax(of_texts: bool = True) -> None:
    """Raises ``InputError`` in a fork, where JAX waits for threads, or if settings stop decoding.

    Decoding ``of_texts`` moves arrays from the host and back.
    """
    first, own = _first_process(), os.getpid()
    if own != first:
        raise InputError(f"process {own} is a fork of {first}, which used JAX: start it by 'spawn'")
    import jax

    if jax.config.jax_enable_x64:
        raise InputError("jax_enable_x64 is True and texts are decoded in 32 bits: set it to False")
    if not of_texts:
        return
    for way in ("host_to_device", "device_to_host"):
        value = getattr(jax.config, name := f"jax_transfer_guard_{way}")
        # The host reads a CPU's arrays in their place.
        is_free = way == "device_to_host" and jax.default_backend() == "cpu"
        if str(value).startswith("disallow") and not is_free:
            raise InputError(f"{name} is {value!r} and texts are on the host: set it to 'allow'")


def one_line(what: Any, most: int = 200) -> str:
    """Returns an error's text (or type, if empty), or a value's, as one line, cut to ``most``."""
    text = " ".join(str(what).split()) or type(what).__name__
    return text if len(text) <= most else text[: most - 3] + "..."


@contextlib.contextmanager
def as_input_error(what: str, remedy: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these kinds of the code inside into an ``InputError``, with their text.

    An ``InputError`` inside is raised as it is. Errors without a common type need ``Exception``.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        reason = one_line(getattr(error, "strerror", None) or error)
        raise InputError(f"{what} ({reason}): {remedy}") from error


def is_out_of_memory(error: Exception) -> bool:
    """Tells whether an error of JAX says that a device's memory is exhausted."""
    return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raises ``InputError`` unless ``value``, the option ``name``'s, is one of ``choices``."""
    # A list, because ``in`` fails on a set or dict if the value is unhashable.
    if value not in list(choices):
        raise InputError(f"{name} is {value!r}: choose one of {', '.join(map(str, choices))}")


def either(choices: Sequence[str]) -> str:
    """Returns choices as a message names them: ``a, b or c``."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns ", did you mean 'CHOICE'?" for a choice that begins so or is close, or else ""."""
    choices = list(choices)
    begun = [choice for choice in choices if len(word) > 2 and choice.startswith(word)]
    similar = begun or difflib.get_close_matches(word, choices, n=1, cutoff=cutoff)
    return f", did you mean {similar[0]!r}?" if similar else ""
