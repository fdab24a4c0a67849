"""A model of T5X made into one of the plug-in's, whatever built it."""

from typing import Any

from t5x import models

from spec_t5x.errors import InputError


def remade(
    model: models.BaseTransformerModel, stock: type, made: type, unused: tuple[str, ...]
) -> Any:
    """The same model, its attributes included, as an instance of ``made``.

    What a subclass of ``stock`` has of its own (features, losses, metrics, …) stays: the
    result is an instance of it, too.

    Args:
      model: a ``stock``, or of a subclass.
      stock: T5X's class.
      made: a subclass of ``stock``.
      unused: methods of ``stock`` that ``made`` no longer calls.

    Raises:
      InputError: the model's class overrides one of these.
    """
    own = type(model)
    for name in unused:
        if getattr(own, name, None) is not getattr(stock, name, None):
            raise InputError(
                f"{own.__name__} overrides {stock.__name__}.{name}, which {made.__name__} would "
                f"not call: give a model that leaves it as {stock.__name__} has it"
            )
    made_of = made if own is stock else type(made.__name__, (made, own), {})
    result = made_of.__new__(made_of)
    vars(result).update(vars(model))
    return result
