"""Registry of families, drafts, verifiers, formats, tokenizers, operations and trainings.

An entry has a kind, a name and an address ``module:object``, which is imported when the entry is
looked up. The core's entries are listed here. Each folder of ``spec_t5x/contrib`` registers its
entries when it is imported; the first look-up imports all of these folders:

    register("draft", medusa="spec_t5x.contrib.medusa.draft:KIND")

Another package does likewise when Python or a gin file imports it (``import mypkg``).
"""

import functools
import importlib
import pkgutil
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError, as_input_error, check_choice

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
    "verifier": {
        "token": "spec_t5x.verifiers:TokenVerifier",
        "block": "spec_t5x.verifiers:BlockVerifier",
        "coupled": "spec_t5x.verifiers:CoupledVerifier",
        "rejection": "spec_t5x.verifiers:RejectionVerifier",
        "multi": "spec_t5x.verifiers:TreeVerifier",
        "tree": "spec_t5x.verifiers:TreeVerifier",
    },
    "format": {
        "t5x": "spec_t5x.checkpoints.formats:T5X",
        "huggingface": "spec_t5x.checkpoints.formats:HUGGINGFACE",
        "native": "spec_t5x.checkpoints.formats:NATIVE",
    },
    "tokenizer": {"unigram": "spec_t5x.data.unigram:UnigramVocabulary"},
    **{kind: {} for kind in ("operations", "training", "training data")},
}


def register(kind: str, **places: str) -> None:
    """Adds addresses by name; raises ``ValueError`` for an unknown kind or a name that is taken."""
    check_choice("kind", kind, _PLACES)
    known = _PLACES[kind]
    for name, place in places.items():
        if known.setdefault(name, place) != place:
            raise ValueError(f"{kind} {name!r} is {known[name]} already, not {place}: rename it")


def names(kind: str) -> tuple[str, ...]:
    """Returns the names registered for a kind, the core's first; () for an unknown kind."""
    _import_contrib()
    return tuple(_PLACES.get(kind, {}))


def find(kind: str, name: str) -> Any:
    """Imports and returns the object registered as ``name``; raises ``InputError`` if none is."""
    if name not in names(kind):
        known = ", ".join(names(kind)) or "none"
        raise InputError(f"no {kind} is called {name!r}: give one of those registered, {known}")
    place, remedy = _PLACES[kind][name], "give its module:object, or mend it"
    what = f"{kind} {name!r} is registered as {place}"
    with as_input_error(what, remedy, ImportError, AttributeError):
        return pkgutil.resolve_name(place)


def find_all(kind: str) -> dict[str, Any]:
    """Imports and returns all objects of a kind, by name."""
    return {name: find(kind, name) for name in names(kind)}


@functools.cache
def _import_contrib() -> None:
    """Imports every folder of ``contrib`` once, so that each registers its entries."""
    for folder in pkgutil.iter_modules([str(Path(__file__).with_name("contrib"))]):
        importlib.import_module(f"spec_t5x.contrib.{folder.name}")
