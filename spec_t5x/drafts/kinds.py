"""Drafts by name: how one is made of what stands after the colon in ``--draft NAME:ARGUMENT``.

A kind of drafts is an entry of the registry. A draft of one's own has it beside its class:

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

    # How the draft samples; None takes the target's settings.
    settings: Sampling | None = None
    # What its networks compute in; "auto" is the type that the platform is quick in.
    dtype: str = "auto"
    # Of a model that drafts: "auto" is what the checkpoint has; "int8", "int4" round its matrices.
    weights: str = AUTO

    def __post_init__(self):
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A target that a draft is made for."""

    # The checkpoint, a ``LoadedModel``, and the same bound for decoding, whose parameters some
    # drafts share.
    target: Any
    model: CachedModel
    options: DraftOptions
    # Makes another draft, by its text, for the same target and with these options.
    make: Callable[[str, DraftOptions], Draft]
    # Gives the packaged draft of a kind, or raises ``InputError`` where the target has none.
    packaged: Callable[[str], str]

    def draft(self, text: str) -> Draft:
        """Another draft, by its text, with the same options."""
        return self.make(text, self.options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftKind:
    """Drafts of one name."""

    # Makes the draft of what stands after the colon, "" where nothing does.
    make: Callable[[Request, str], Draft]
    # The "format" in config.json of a directory that holds one.
    format: str | None = None
    # The checkpoints, and the texts of other drafts, that the argument names.
    checkpoints: Callable[[str], Sequence[str]] = lambda argument: ()
    drafts: Callable[[str], Sequence[str]] = lambda argument: ()
    # Says whether it builds on more of a target than its vocabulary, and on its encoder.
    needs_network: bool = True
    needs_encoder: bool = False
    # Says whether it may sample in its own way.
    has_temperature: bool = True


def one_checkpoint(argument: str) -> Sequence[str]:
    """The argument of a kind that is read from a directory."""
    return [argument] if argument else []


def refuse_argument(name: str, argument: str) -> None:
    """Raises ``InputError`` where something stands after the colon."""
    if argument:
        raise InputError(f"draft {name}:{argument}: {name} takes no argument")


def whole_number(name: str, argument: str) -> int:
    """The number after the colon.

    Raises:
      InputError: it is none.
    """
    if not argument.isdigit():
        raise InputError(f"draft {name}:{argument}: give a whole number after the colon")
    return int(argument)
