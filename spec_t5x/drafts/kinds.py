"""Kinds of drafts: the kind NAME makes the draft that ``--draft NAME:ARGUMENT`` selects.

A kind is an entry of the registry. The module of a user's draft defines the draft's kind:

    KIND = DraftKind(make=lambda request, argument: Parrot(request.model.vocab_size))
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from spec_t5x.errors import InputError, check_choice, one_line
from spec_t5x.interfaces import Draft
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.names import AUTO, WEIGHTS
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Options that all kinds of drafts receive."""

    # Settings that the draft samples with; None takes the target's.
    settings: Sampling | None = None
    # Type that the draft's networks compute in; "auto" is the platform's fast one.
    dtype: str = "auto"
    # Precision of a draft model: "auto" is the checkpoint's; "int8" and "int4" round matrices.
    weights: str = AUTO
    # Function from the configuration of a draft model to its parameters' shardings; None for none.
    shardings: Callable[[Any], PyTree] | None = None

    def __post_init__(self):
        check_choice("weights", self.weights, WEIGHTS)
        if not isinstance(self.settings, Sampling | None):
            raise InputError(f"settings are {self.settings!r}: give distributions.sampling(…)")
        if not (self.shardings is None or callable(self.shardings)):
            raise InputError(f"shardings are {one_line(repr(self.shardings))}: give a function")
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Request for a draft: the target that the draft is made for, and options."""

    # The target's checkpoint, a ``LoadedModel``, and the same model bound for decoding.
    target: Any
    model: CachedModel
    options: DraftOptions
    # Makes another draft, from its ``NAME:ARGUMENT``, for the same target.
    make: Callable[[str, DraftOptions], Draft]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftKind:
    """Kind of draft: how to make the draft from an argument, and what the draft needs."""

    # Makes the draft from the argument after the colon ("" for none), or from a directory's name.
    make: Callable[[Request, str], Draft]
    # The class of the drafts, by which options are checked before a download; None if unknown.
    draft: type | None = None
    # The "format" in config.json of a directory with a draft of this kind; None if none has.
    format: str | None = None
    # Whether the argument names a checkpoint, which is found before the target is loaded.
    has_checkpoint: bool = False
    # The ``NAME:ARGUMENT`` of other drafts that the argument names.
    drafts: Callable[[str], Sequence[str]] = lambda argument: ()
    # Raises ``InputError`` for an invalid argument; gets the draft's whole text, and the argument.
    check: Callable[[str, str], object] = lambda text, argument: None
    # Opens what the argument names; raises ``InputError`` if it is of another kind or does not fit
    # the target (a ``LoadedModel``, which may lack parameters). Loads no weights.
    open: Callable[[str, Any], object] = lambda argument, target: None
    # Kind of the target's packaged draft that an empty argument selects; None if it selects none.
    packaged: str | None = None
    # Whether the draft needs more of a target than its vocabulary, and whether an encoder.
    needs_network: bool = True
    needs_encoder: bool = False
    # Whether the draft itself takes ``DraftOptions.settings``, and ``weights``; others may inside.
    has_temperature: bool = False
    has_weights: bool = False


def no_argument(text: str, argument: str) -> None:
    """Raises ``InputError`` if the draft ``text`` has an argument."""
    if argument:
        raise InputError(f"draft {text}: {text.removesuffix(f':{argument}')} takes no argument")


def whole_number(text: str, argument: str) -> None:
    """Raises ``InputError`` if the argument of the draft ``text`` is given and no number from 1."""
    if argument and not (argument.isdecimal() and argument.strip("0")):
        raise InputError(f"draft {text}: give a whole number from 1 after the colon")
