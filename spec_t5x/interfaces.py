"""What the loops ask of models. Anything that fits these Protocols can be decoded.

The loops import nothing else of a model: a target is anything that can *score*
new tokens, a draft anything that can *propose* them. Both are pytrees (parameters
are leaves), so they are passed into a compiled function rather than closed over.

Positions. A row's sequence is ``[start token, token 1, token 2, …]``; position 0 is
the start token. "Length" counts the tokens after it. A cache of length n holds
positions 0 … n-1; the logits after feeding position n predict token n+1.
"""

from typing import Any, Protocol, runtime_checkable

import flax.struct

from spec_t5x.distributions import Sampling
from spec_t5x.types import Array, Float, Float32, Int, Key, PyTree

Cache = Any
DraftState = Any


@flax.struct.dataclass
class Proposal:
    """What a draft proposes for one iteration."""

    # The proposed tokens.
    tokens: Int[Array, "batch gamma"]
    # The distributions they were drawn from, after standardization: what the
    # verifier must see.
    probs: Float[Array, "batch gamma vocab"]


@runtime_checkable
class Target(Protocol):
    """A model whose output is wanted."""

    @property
    def vocab_size(self) -> int:
        """Number of logits, padding of the vocabulary included."""

    def prefill(self, inputs: PyTree, max_length: int) -> Cache:
        """Encodes ``inputs`` and makes an empty cache for ``max_length`` tokens.

        Every leaf of the cache leads with the batch axis.
        """

    def score(
        self, cache: Cache, tokens: Int[Array, "batch new"]
    ) -> tuple[Float32[Array, "batch new vocab"], Cache]:
        """Feeds new tokens at each row's length: logits after each, longer cache."""

    def rollback(self, cache: Cache, lengths: Int[Array, "batch"]) -> Cache:
        """The cache with each row's length set to ``lengths``."""


@runtime_checkable
class Draft(Protocol):
    """Anything that proposes the tokens that may come next."""

    @property
    def vocab_size(self) -> int:
        """Must equal the target's."""

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch length"], max_length: int
    ) -> DraftState:
        """State before the first proposal; ``prompts`` start with the start token.

        Every leaf of the state leads with the batch axis.
        """

    def propose(
        self,
        state: DraftState,
        sequences: Int[Array, "batch length"],
        lengths: Int[Array, "batch"],
        keys: Key[Array, "batch"],
        gamma: int,
        settings: Sampling,
    ) -> tuple[Proposal, DraftState]:
        """Proposes ``gamma`` tokens to follow ``sequences[b, :lengths[b] + 1]``.

        ``settings`` are the target's; a draft may have its own (section 6).
        """

    def commit(self, state: DraftState, lengths: Int[Array, "batch"]) -> DraftState:
        """Told the rows' lengths after verification: forget what was rejected."""
