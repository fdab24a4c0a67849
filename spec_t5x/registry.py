"""Things that have a name, in one table: families of networks, drafts, formats, vocabularies.

An entry says where a thing is, as ``module:name``; it is imported once it is asked for, so that
names alone cost nothing. The core's own are listed here. A folder of ``spec_t5x/contrib`` adds its
own when it is imported, which the first look-up does for every folder that is there:

    register("draft", medusa="spec_t5x.contrib.medusa.draft:NAMED")

A program may register its own before it looks anything up.
"""

import functools
import importlib
import importlib.util
import pkgutil
from typing import Any

from spec_t5x.errors import InputError

_CONTRIB = "spec_t5x.contrib"
# Places by kind and name.
_PLACES: dict[str, dict[str, str]] = {
    "family": {
        "t5": "spec_t5x.models.sizes:T5",
        "t5gemma": "spec_t5x.models.t5gemma:T5GEMMA",
        "gpt": "spec_t5x.models.gpt:FAMILY",
    },
    "training data": {"TextOptions": "spec_t5x.labs.training.run_data:TextOptions"},
    "tokenizer": {
        "unigram": "spec_t5x.data.unigram:UnigramVocabulary",
        "wordpiece": "spec_t5x.data.wordpiece:WordPieceVocabulary",
    },
    "format": {
        "t5x": "spec_t5x.checkpoints.formats:T5X",
        "huggingface": "spec_t5x.checkpoints.formats:HUGGINGFACE",
        "native": "spec_t5x.checkpoints.formats:NATIVE",
        "gpt2": "spec_t5x.checkpoints.huggingface.gpt2:FORMAT",
        "t5gemma": "spec_t5x.checkpoints.huggingface.t5gemma:FORMAT",
        "gemma": "spec_t5x.checkpoints.gemma.reading:FORMAT",
    },
}


def register(kind: str, **places: str) -> None:
    """Adds entries of a kind by name.

    Raises:
      ValueError: a name is taken by something else.
    """
    known = _PLACES.setdefault(kind, {})
    for name, place in places.items():
        if known.setdefault(name, place) != place:
            raise ValueError(f"{kind} {name!r} is {known[name]} already, not {place}: rename it")


def names(kind: str) -> tuple[str, ...]:
    """The names of a kind, the core's first; none where nothing of the kind is registered."""
    _import_contrib()
    return tuple(_PLACES.get(kind, {}))


def find(kind: str, name: str) -> Any:
    """The thing of that name.

    Raises:
      InputError: there is none; the message lists those that are registered.
    """
    if name not in names(kind):
        known = ", ".join(names(kind)) or "none"
        raise InputError(f"no {kind} is called {name!r}: give one of those registered, {known}")
    return _at(_PLACES[kind][name])


def find_all(kind: str) -> dict[str, Any]:
    """All things of a kind by name."""
    return {name: _at(_PLACES[kind][name]) for name in names(kind)}


@functools.cache
def _at(place: str) -> Any:
    return pkgutil.resolve_name(place)


@functools.cache
def _import_contrib() -> None:
    """Imports every folder of ``contrib``, each of which registers what it brings."""
    if importlib.util.find_spec(_CONTRIB) is None:
        return
    for folder in pkgutil.iter_modules(importlib.import_module(_CONTRIB).__path__):
        importlib.import_module(f"{_CONTRIB}.{folder.name}")
