"""Families of networks, drafts, formats, tokenizers and operations by name, in one table.

An entry is a thing's address, ``module:name``, which is imported when it is looked up. The core's
own are listed here. A folder of ``spec_t5x/contrib`` adds its own when it is imported, which the
first look-up does for every folder:

    register("draft", medusa="spec_t5x.contrib.medusa.draft:KIND")

A program may register its own before it looks anything up.
"""

import functools
import importlib
import pkgutil
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError

# Addresses by kind and name.
_PLACES: dict[str, dict[str, str]] = {
    "family": {"t5": "spec_t5x.models.sizes:T5"},
    "draft": {
        "transformer": "spec_t5x.checkpoints.make_draft:KIND",
        "unigram": "spec_t5x.checkpoints.native.ngram_tables:UNIGRAM",
        "bigram": "spec_t5x.checkpoints.native.ngram_tables:BIGRAM",
        "ngram": "spec_t5x.checkpoints.native.ngram_tables:NGRAM",
        "copy": "spec_t5x.drafts.copying:KIND",
        "uniform": "spec_t5x.drafts.uniform:KIND",
        "eagle": "spec_t5x.checkpoints.native.target_drafts:EAGLE_KIND",
        "shared_encoder": "spec_t5x.checkpoints.native.target_drafts:SHARED_KIND",
        "early_exit": "spec_t5x.drafts.self_draft:EARLY_EXIT",
        "int8": "spec_t5x.drafts.self_draft:IN_INT8",
        "int4": "spec_t5x.drafts.self_draft:IN_INT4",
        "mixed": "spec_t5x.drafts.mixed:KIND",
    },
    "format": {
        "t5x": "spec_t5x.checkpoints.formats:T5X",
        "huggingface": "spec_t5x.checkpoints.formats:HUGGINGFACE",
        "native": "spec_t5x.checkpoints.formats:NATIVE",
    },
    "tokenizer": {"unigram": "spec_t5x.data.unigram:UnigramVocabulary"},
}


def register(kind: str, **places: str) -> None:
    """Adds entries of a kind by name; raises ``ValueError`` if a name has another entry."""
    known = _PLACES.setdefault(kind, {})
    for name, place in places.items():
        if known.setdefault(name, place) != place:
            raise ValueError(f"{kind} {name!r} is {known[name]} already, not {place}: rename it")


def names(kind: str) -> tuple[str, ...]:
    """Returns the names of a kind, the core's first."""
    _import_contrib()
    return tuple(_PLACES.get(kind, {}))


def find(kind: str, name: str) -> Any:
    """Returns the thing of a name; raises ``InputError`` with the registered names otherwise."""
    if name not in names(kind):
        known = ", ".join(names(kind)) or "none"
        raise InputError(f"no {kind} is called {name!r}: give one of those registered, {known}")
    return _at(_PLACES[kind][name])


def find_all(kind: str) -> dict[str, Any]:
    """Returns all things of a kind by name."""
    return {name: _at(_PLACES[kind][name]) for name in names(kind)}


@functools.cache
def _at(place: str) -> Any:
    return pkgutil.resolve_name(place)


@functools.cache
def _import_contrib() -> None:
    """Imports every folder of ``contrib``, each of which registers its own entries."""
    for folder in pkgutil.iter_modules([str(Path(__file__).with_name("contrib"))]):
        importlib.import_module(f"spec_t5x.contrib.{folder.name}")
