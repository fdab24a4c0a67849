"""Drafts by name: each kind makes one of the argument in ``--draft NAME:ARGUMENT``.

A kind is an entry of the registry. A user's draft has its kind beside its class:

    KIND = DraftKind(make=lambda request, argument: Parrot(request.model.vocab_size))
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.names import AUTO
from spec_t5x.sampling.distributions import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Settings that drafts share."""

    # Settings that the draft samples with; None takes the target's.
    settings: Sampling | None = None
    # Type that its networks compute in; "auto" is the platform's fast one.
    dtype: str = "auto"
    # Precision of a model that drafts: "auto" is the checkpoint's; "int8" and "int4" round.
    weights: str = AUTO

    def __post_init__(self):
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A target that a draft is made for."""

    # The checkpoint, a ``LoadedModel``, and the same bound for decoding.
    target: Any
    model: CachedModel
    options: DraftOptions
    # Makes another draft by its text, for the same target.
    make: Callable[[str, DraftOptions], Draft]
    # Returns the packaged draft of a kind, or raises ``InputError`` if the target has none.
    packaged: Callable[[str], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftKind:
    """Drafts of one name."""

    # Makes the draft of the text after the colon, "" for none.
    make: Callable[[Request, str], Draft]
    # The "format" in config.json of a directory that holds one.
    format: str | None = None
    # The checkpoints, and the texts of other drafts, that the argument names.
    checkpoints: Callable[[str], Sequence[str]] = lambda argument: ()
    drafts: Callable[[str], Sequence[str]] = lambda argument: ()
    # True if the draft needs more of a target than its vocabulary, and if it needs an encoder.
    needs_network: bool = True
    needs_encoder: bool = False
    # True if the draft may sample with separate settings.
    has_temperature: bool = True


def one_checkpoint(argument: str) -> Sequence[str]:
    """Returns the argument, the directory of a draft, in a list that may be empty."""
    return [argument] if argument else []


def refuse_argument(name: str, argument: str) -> None:
    """Raises ``InputError`` for a text after the colon."""
    if argument:
        raise InputError(f"draft {name}:{argument}: {name} takes no argument")


def whole_number(name: str, argument: str) -> int:
    """Returns the number after the colon, or raises ``InputError``."""
    if not argument.isdigit():
        raise InputError(f"draft {name}:{argument}: give a whole number after the colon")
    return int(argument)
