"""Arguments of a training, built from gin's bindings; a binding without effect is refused."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import gin

from spec_t5x.errors import InputError


def built_arguments(training: Callable, flags: Sequence[str]) -> dict[str, Any]:
    """Builds a training's arguments as gin binds them.

    Raises:
        InputError: an argument is a text, function or class in place of an object or a number, or
            a flag, ``--gin.CLASS.NAME=VALUE``, or a file's binding in a scope is of a class that no
            argument is made of.
    """
    arguments, parameters = gin.get_bindings(training), inspect.signature(training).parameters
    for name, value in arguments.items():
        if name in parameters:
            _check_kind(f"{training.__name__}.{name}", value, parameters[name].annotation)
    _check_used(training.__name__, flags)
    return arguments


def _check_kind(name: str, value: Any, kind: Any) -> None:
    """Raises ``InputError`` if a text, function or class is given for a value of type ``kind``.

    Checks nothing if the annotation ``kind`` is absent or names no class, as in functions of other
    packages.
    """
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    classes = [a for a in allowed if isinstance(a, type) and type(a) is not types.GenericAlias]
    is_known = kind is not inspect.Parameter.empty and len(classes) == len(allowed)
    is_name = isinstance(value, str | type | types.FunctionType)
    if is_known and is_name and not isinstance(value, allowed):
        wanted = getattr(kind, "__name__", kind)
        raise InputError(
            f"{name} is {value!r}: give a value of type {wanted} (an object is written @CLASS())"
        )


def _check_used(training: str, flags: Sequence[str]) -> None:
    """Raises ``InputError`` if nothing that gin has made uses a flag, or a binding in a scope.

    Without a scope, an unused binding may be of an included file whose class the file replaces.
    """
    # A scope's bindings are also used by what is made in a scope within it.
    built = re.findall(
        r"^# Parameters for (.*/)?(?:.*\.)?(\w+):$", gin.operative_config_str(), re.M
    )
    bindings = [flag.partition("=")[0] for flag in flags]
    # gin has no public list of its bindings.
    for (scope, owner), values in gin.config._CONFIG.items():
        bindings += [f"{scope}/{owner}.{name}" for name in values if scope]
    for binding in bindings:
        # A name without a dot is a macro's.
        owner = binding.removeprefix("--gin.").rpartition(".")[0]
        scope, name = owner[: owner.rfind("/") + 1], re.split("[./]", owner)[-1]
        is_used = any(made == name and within.startswith(scope) for within, made in built)
        # What tasks are made of may be called later, as data are read.
        if scope + name not in ("", training) and not is_used and _is_ours(owner):
            raise InputError(f"nothing uses {binding}: leave it out, or bind @{scope}{name}()")


def _is_ours(owner: str) -> bool:
    """Returns True if gin's name is that of a class or function of this package."""
    return gin.get_configurable(owner.rpartition("/")[2]).__module__.startswith("spec_t5x")
