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
from typing import ClassVar

import jax
import jax.numpy as jnp

from spec_t5x.distributions import MIN_TEMPERATURE, Sampling, argmax
from spec_t5x.draws import Stream, purpose_keys, sample_coupled
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Proposal
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


VERIFIERS: dict[str, type[Verifier]] = {
    "token": TokenVerifier,
    "block": BlockVerifier,
    "coupled": CoupledVerifier,
    "rejection": RejectionVerifier,
}


def verifier(name: str = "block", lenience: float = 1.0) -> Verifier:
    """A verifier by its name.

    Raises:
      InputError: an unknown name, a lenience outside (0, 1], or one below 1 with a
        verifier that has none.
    """
    if name not in VERIFIERS:
        raise InputError(f"verifier is {name!r}: choose one of {', '.join(sorted(VERIFIERS))}")
    # Checks the range too.
    token = TokenVerifier(lenience)
    if name == "token":
        return token
    if lenience != 1:
        raise InputError(
            f"lenience is {lenience} and verifier {name!r}: choose token, or lenience 1"
        )
    return VERIFIERS[name]()
