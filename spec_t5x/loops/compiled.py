"""``jit`` for functions of models and drafts, whose programs it tells apart by their classes.

JAX looks a program up by its arguments' structure, in which two dataclasses with as many leaves
and equal static fields are the same: a draft class that a notebook defines again could run the
program of the first.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Names of arguments that are models or drafts.
_MODELS = ("target", "model", "draft", "draft_model", "drafts")


def classes_of(*objects: Any) -> tuple[type, ...]:
    """Returns the classes of objects, but None, and of the dataclasses that they hold."""
    found, given = [], [one for one in objects if one is not None]
    while given:
        one, values = given.pop(), ()
        if isinstance(one, Mapping | tuple | list):
            values = one.values() if isinstance(one, Mapping) else one
        else:
            found.append(type(one))
            if dataclasses.is_dataclass(one):
                values = [getattr(one, field.name) for field in dataclasses.fields(one)]
        # No mappings in fields, which may be parameters.
        given += [v for v in values if dataclasses.is_dataclass(v) or isinstance(v, tuple | list)]
    return tuple(found)


def jit(
    function: Callable | None = None,
    *,
    check: Callable[..., None] = lambda **arguments: None,
    **options: Any,
) -> Callable:
    """Jits a function with a program for each class of its ``target``, ``draft`` and so on.

    ``check`` gets the arguments by name before each call. ``options`` are those of ``jax.jit``,
    whose methods ``lower`` and ``trace`` the result has.
    """
    if function is None:
        return functools.partial(jit, check=check, **options)
    signature = inspect.signature(function)

    # Each has its own function, as JAX keeps what it has traced of a function.
    @functools.cache
    def jitted(classes: tuple[type, ...]) -> Callable:
        @functools.wraps(function)
        def traced(*args, **kwargs):
            # Counts add true and false, which a user's stricter setting refuses.
            with jax.numpy_dtype_promotion("standard"):
                return function(*args, **kwargs)

        return jax.jit(traced, **options)

    def program(*args, **kwargs) -> Callable:
        given = signature.bind(*args, **kwargs).arguments
        return jitted(classes_of(*map(given.get, _MODELS)))

    @functools.wraps(function)
    def call(*args, **kwargs):
        check(**signature.bind(*args, **kwargs).arguments)
        return program(*args, **kwargs)(*args, **kwargs)

    call.lower = lambda *args, **kwargs: program(*args, **kwargs).lower(*args, **kwargs)
    call.trace = lambda *args, **kwargs: program(*args, **kwargs).trace(*args, **kwargs)
    return call
