"""Verifiers as the loops use them: batched, with settings of their own, chosen by name.

A verifier is a frozen dataclass (part of the compiled program) that turns a proposal and
the target's distributions into a ``Verdict`` for each row. One of your own is a subclass
of ``Verifier`` with ``verify_row``:

    @dataclasses.dataclass(frozen=True)
    class FirstOnly(Verifier):
        \"\"\"Trusts no draft but the first.\"\"\"

        def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs):
            shorter = draft_probs.at[1:].set(0.0)  # as if nothing more were proposed
            return token_verification(key, emit_key, draft_tokens, shorter, target_probs)
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from spec_t5x.distributions import MIN_TEMPERATURE, Sampling, argmax, overlap
from spec_t5x.draws import Stream, purpose_keys, sample_coupled
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Proposal
from spec_t5x.trees import Tree
from spec_t5x.types import Array, Float, Float32, Int, Key
from spec_t5x.verification import (
    Verdict,
    block_verification,
    lenient_argmax_verification,
    mask_unproposed,
    matching_verification,
    rejection_verification,
    token_verification,
)


@dataclasses.dataclass(frozen=True)
class Verifier:
    """Base of all verifiers. Lossless, unless a subclass says otherwise."""

    # Whether draft and target sample with the same noise at the same position.
    coupled: ClassVar[bool] = False

    def num_nodes(self, gamma: int) -> int:
        """Tokens that the target is fed in one call."""
        return gamma + 1

    def overlap(self, target_probs: Array, draft_probs: Array) -> Array:
        """Chance that a draft is accepted, at each position: beta, whose mean is alpha.

        Of ``[batch, gamma]`` positions; the target has a row more, after the last draft.
        """
        return overlap(target_probs, draft_probs)

    def verify_row(
        self,
        key: Key[Array, ""],
        emit_key: Key[Array, ""],
        draft_tokens: Int[Array, "gamma"],
        draft_probs: Float[Array, "gamma vocab"],
        target_probs: Float[Array, "gamma+1 vocab"],
    ) -> Verdict:
        """One row's verdict; the arguments are ``verification.token_verification``'s."""
        raise NotImplementedError

    def __call__(
        self,
        stream: Stream,
        lengths: Int[Array, "batch"],
        proposal: Proposal,
        target_logits: Float32[Array, "batch block vocab"],
        target_probs: Float32[Array, "batch block vocab"],
        settings: Sampling,
    ) -> Verdict:
        """A verdict for each row.

        Args:
          stream: where the rows' random numbers come from.
          lengths: tokens that the rows hold.
          proposal: what the draft proposes.
          target_logits: the target's, at each draft and after the last one.
          target_probs: the same after ``standardize``.
          settings: what they were standardized with.
        """
        if settings.greedy:
            return self.verify_argmax(proposal, target_logits)
        emit_keys, accept_keys, _ = purpose_keys(stream, lengths)
        draft_probs = jax.vmap(mask_unproposed)(proposal.probs, proposal.counts)
        return jax.vmap(self.verify_row)(
            accept_keys, emit_keys, proposal.tokens, draft_probs, target_probs
        )

    def verify_argmax(
        self, proposal: Proposal, target_logits: Float32[Array, "batch block vocab"]
    ) -> Verdict:
        """The verdict at temperature 0, where all lossless verifiers agree."""
        return jax.vmap(matching_verification)(
            proposal.tokens, argmax(target_logits), proposal.counts
        )


@dataclasses.dataclass(frozen=True)
class TokenVerifier(Verifier):
    """Algorithm 1. Lossy with a lenience below 1 (section A.5), and only then."""

    # l: multiplies the draft's probability in the comparison; 1 is lossless.
    lenience: float = 1.0

    def __post_init__(self):
        if not 0 < self.lenience <= 1:
            raise InputError(
                f"lenience is {self.lenience}: give a number above 0, at most 1 (1 is lossless)"
            )

    def overlap(self, target_probs: Array, draft_probs: Array) -> Array:
        """``sum min(p / l, q)`` (section A.5)."""
        return overlap(target_probs / self.lenience, draft_probs)

    def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs) -> Verdict:
        """Accepts while ``u l q(x) < p(x)``."""
        return token_verification(
            key, emit_key, draft_tokens, draft_probs, target_probs, self.lenience
        )

    def __call__(self, stream, lengths, proposal, target_logits, target_probs, settings) -> Verdict:
        """As the base, with the lenience of argmax for the rows at temperature 0."""
        verdict = super().__call__(stream, lengths, proposal, target_logits, target_probs, settings)
        if self.lenience == 1 or settings.temperature.ndim == 0:
            return verdict
        # A row's lenience does not depend on the temperatures of the rows beside it.
        at_argmax = settings.temperature <= MIN_TEMPERATURE
        of_argmax = self.verify_argmax(proposal, target_logits)
        return jax.tree.map(
            lambda ours, theirs: jnp.where(at_argmax, ours, theirs), of_argmax, verdict
        )

    def verify_argmax(
        self, proposal: Proposal, target_logits: Float32[Array, "batch block vocab"]
    ) -> Verdict:
        """Accepts the argmax, or with lenience ``p(x) >= l max(p)``."""
        if self.lenience == 1:
            return super().verify_argmax(proposal, target_logits)
        return jax.vmap(lenient_argmax_verification, (0, 0, 0, 0, None))(
            proposal.tokens, target_logits, argmax(target_logits), proposal.counts, self.lenience
        )


@dataclasses.dataclass(frozen=True)
class BlockVerifier(Verifier):
    """Verifies a block jointly: never accepts fewer than ``TokenVerifier`` in expectation."""

    def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs) -> Verdict:
        """See ``verification.block_verification``."""
        return block_verification(key, emit_key, draft_tokens, draft_probs, target_probs)


@dataclasses.dataclass(frozen=True)
class RejectionVerifier(Verifier):
    """Rejection sampling, the paper's comparison (section A.2)."""

    def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs) -> Verdict:
        """See ``verification.rejection_verification``."""
        return rejection_verification(key, emit_key, draft_tokens, draft_probs, target_probs)


@dataclasses.dataclass(frozen=True)
class CoupledVerifier(Verifier):
    """Same noise for draft and target: the text depends on the seed alone."""

    coupled: ClassVar[bool] = True

    def __call__(self, stream, lengths, proposal, target_logits, target_probs, settings) -> Verdict:
        """Accepts while the noise chooses the same token from both distributions."""

        def choose(offset, probs):
            return sample_coupled(stream, lengths + offset, probs, settings)

        offsets = jnp.arange(target_probs.shape[1])
        target_tokens = jax.vmap(choose, (0, 1), 1)(offsets, target_probs)
        return jax.vmap(matching_verification)(proposal.tokens, target_tokens, proposal.counts)


@dataclasses.dataclass(frozen=True)
class TreeVerifier:
    """Several drafts for one place, without replacement, in a static tree.

    What it does is in ``tree_decoding.py``.
    """

    # Drafts for the next places; each is continued by one draft a place, up to gamma.
    widths: tuple[int, ...] = (2,)
    coupled: ClassVar[bool] = False

    def __post_init__(self):
        object.__setattr__(self, "widths", tuple(self.widths))
        if not self.widths or min(self.widths) < 1:
            raise InputError(f"tree widths are {self.widths}: give at least 1 for each place")

    def tree(self, gamma: int) -> Tree:
        """The tree of depth ``gamma``.

        Raises:
          InputError: gamma is 0, or the tree is too large.
        """
        if gamma < 1:
            raise InputError(f"gamma is {gamma}: a tree of drafts needs at least 1")
        return Tree((*self.widths, *[1] * (gamma - len(self.widths)))[:gamma])

    def num_nodes(self, gamma: int) -> int:
        """Tokens that the target is fed in one call."""
        return self.tree(gamma).num_nodes


VERIFIERS: dict[str, type[Verifier | TreeVerifier]] = {
    "token": TokenVerifier,
    "block": BlockVerifier,
    "coupled": CoupledVerifier,
    "rejection": RejectionVerifier,
    "multi": TreeVerifier,
    "tree": TreeVerifier,
}
# Drafts for each place, where the user does not say.
DEFAULT_WIDTHS = {"multi": (3,), "tree": (3, 2)}


def verifier(
    name: str = "block", *, lenience: float = 1.0, widths: Sequence[int] = ()
) -> Verifier | TreeVerifier:
    """A verifier by its name.

    Args:
      name: a key of ``VERIFIERS``.
      lenience: of ``token`` alone, in (0, 1]; below 1 it is lossy (section A.5).
      widths: drafts for the next place of ``multi`` (one number), for the next places
        of ``tree``; empty takes ``DEFAULT_WIDTHS``.

    Raises:
      InputError: an unknown name, or settings that it does not have.
    """
    if name not in VERIFIERS:
        raise InputError(f"verifier is {name!r}: choose one of {', '.join(VERIFIERS)}")
    # Checks the range too.
    token = TokenVerifier(lenience)
    if name == "token":
        chosen = token
    elif lenience != 1:
        raise InputError(f"lenience is {lenience} and verifier {name!r}: only token is lenient")
    elif name in DEFAULT_WIDTHS:
        if name == "multi" and len(widths) > 1:
            raise InputError(f"widths are {tuple(widths)}: multi takes one number, tree several")
        return TreeVerifier(tuple(widths) or DEFAULT_WIDTHS[name])
    else:
        chosen = VERIFIERS[name]()
    if widths:
        raise InputError(f"widths are {tuple(widths)} and verifier {name!r}: only tree has them")
    return chosen
