"""Conversion of T5X's models to subclasses of the package, which keeps gin's bindings of methods.

A gin file may bind an argument of a method, as T5X's documents do with
``models.EncoderDecoderModel.predict_batch_with_aux.num_decodes``. gin then makes instances of a
subclass that has gin's wrapper in the method's place. Here a wrapper does not count as an override:
it is put around the method that replaces the wrapped one.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import gin
from t5x import models

from spec_t5x.errors import InputError


def launch_model() -> models.EncoderDecoderModel:
    """Makes T5X's encoder-decoder with the arguments that the launch's gin files bind.

    If a gin file named the class instead, gin would refuse a subclass's bindings of its methods.

    Raises ``InputError`` if the launch binds no module to the class, or binds a model of another
    class or in a scope, which may be the one that ``MODEL`` was before.
    """
    remedy = "bind speculation.speculate.model = @CLASS() after speculate.gin"
    if "module" not in bindings_of(models.EncoderDecoderModel, resolve_references=False):
        raise InputError(
            "the launch's files bind no models.EncoderDecoderModel.module: give the model's file; "
            f"for a model of another class {remedy}"
        )
    stock = models.EncoderDecoderModel
    # gin has no public list of what is bound.
    for scope, selector in gin.config._CONFIG:
        made = gin.get_configurable(selector)
        if not (isinstance(made, type) and issubclass(made, models.BaseTransformerModel)):
            continue
        # gin's classes have the names of those that they wrap.
        is_stock = (made.__module__, made.__qualname__) == (stock.__module__, stock.__qualname__)
        if made.__module__.startswith(__package__) or (is_stock and not scope):
            continue
        name = "/".join(filter(None, (scope, selector)))
        raise InputError(
            f"the launch binds models.EncoderDecoderModel and {name}: name the model, {remedy}"
        )
    return gin.get_configurable(stock)()


def remade(
    model: models.BaseTransformerModel, stock: type, made: type, unused: tuple[str, ...]
) -> Any:
    """Returns a copy of a model of T5X's class ``stock``, as an instance of its subclass ``made``.

    The copy has the model's attributes, and is also an instance of the model's class, with that
    class's features, losses and metrics. gin's bindings of methods of the model's class and of
    ``made`` apply; the latter take precedence.

    Raises:
      InputError: the model's class overrides one of the methods ``unused``, which ``made`` does not
        call, or gin binds arguments of the constructor of ``made``, which is not called.
    """
    own = type(model)
    for name in unused:
        known = {without_gin(getattr(of, name, None)) for of in (stock, made)}
        if without_gin(getattr(own, name, None)) not in known:
            raise InputError(
                f"{own.__name__} overrides {stock.__name__}.{name}, which {made.__name__} would "
                f"not call: give a model that leaves it as {stock.__name__} has it"
            )
    if issubclass(own, made):
        base = own
    else:
        if bound := bindings_of(made, resolve_references=False):
            raise InputError(
                f"gin binds {made.__name__}.{min(bound)}: bind {stock.__name__}.{min(bound)} "
                f"instead, a {made.__name__} takes its settings from the given model"
            )
        base = made if own is stock else type(made.__name__, (made, own), {})
    bound = {
        name: _wrapped_alike(wrapper, without_gin(getattr(base, name)))
        for name, wrapper in _bound_by_gin(own).items()
        if name in unused
    }
    for name, wrapper in _bound_by_gin(configurable(made)).items():
        bound[name] = _wrapped_alike(wrapper, bound.get(name, getattr(base, name)))
    made_of = type(base)(base.__name__, (base,), bound) if bound else base
    result = made_of.__new__(made_of)
    vars(result).update(vars(model))
    return result


def bindings_of(known: Callable | str, **options: Any) -> dict[str, Any]:
    """Returns the arguments that gin binds; empty if gin does not know the function or class."""
    try:
        return gin.get_bindings(known, **options)
    except ValueError:
        return {}


def configurable(made: Callable) -> Callable:
    """Returns gin's function or subclass, to which files' bindings apply, or else ``made``."""
    try:
        return gin.get_configurable(made)
    except ValueError:
        return made


def _bound_by_gin(of: type) -> dict[str, Callable]:
    """Returns the methods of a class that are gin's wrappers, by name."""
    methods = {name: getattr(of, name, None) for name in dir(of)}
    return {name: method for name, method in methods.items() if _is_gins(method)}


def _is_gins(method: Any) -> bool:
    # functools.wraps copies names to a wrapper, but not the globals of its module.
    return getattr(method, "__globals__", None) is vars(gin.config)


def without_gin(method: Any) -> Any:
    """Returns the function or method that gin wraps, or ``method`` itself if gin does not."""
    while _is_gins(method):
        method = method.__wrapped__
    return method


def _wrapped_alike(wrapper: Callable, method: Callable) -> Callable:
    """Returns ``method`` in a copy of gin's wrapper, or wrappers, of another method.

    The copy reads the bindings at each call, and gin counts them as used by the other method.
    """
    inner = wrapper.__wrapped__
    outer = _wrapped_alike(inner, method) if _is_gins(inner) else method
    closure = tuple(
        types.CellType(outer) if cell.cell_contents is inner else cell
        for cell in wrapper.__closure__
    )
    made = types.FunctionType(
        wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, closure
    )
    return functools.wraps(outer)(made)
