"""Verifiers as the loops use them: batched, with their own settings, chosen by name.

A verifier is a frozen dataclass (part of the compiled program) that turns a proposal and the
target's distributions into a ``Verdict`` for each row. A new one is a subclass of ``Verifier``
with ``verify_row``:

    @dataclasses.dataclass(frozen=True)
    class FirstOnly(Verifier):
        \"\"\"Trusts no draft but the first.\"\"\"

        def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs):
            shorter = draft_probs.at[1:].set(0.0)  # as if nothing more were proposed
            return token_verification(key, emit_key, draft_tokens, shorter, target_probs)
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from spec_t5x.errors import InputError, check_choice
from spec_t5x.interfaces import Proposal
from spec_t5x.sampling.distributions import MIN_TEMPERATURE, Sampling, argmax, overlap, values_at
from spec_t5x.sampling.draws import Stream, purpose_keys, sample_coupled
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.sampling.verification import (
    Verdict,
    block_verification,
    lenient_argmax_acceptable,
    lenient_argmax_verification,
    mask_unproposed,
    matching_verification,
    rejection_acceptance,
    rejection_verification,
    token_verification,
)
from spec_t5x.theory import formulas
from spec_t5x.types import Array, Float, Float32, Int, Key


@dataclasses.dataclass(frozen=True)
class Verifier:
    """Base of all verifiers. Lossless, unless a subclass says otherwise."""

    # Whether draft and target sample with the same noise at the same position.
    coupled: ClassVar[bool] = False

    def tree(self, gamma: int) -> Tree | None:
        """Returns the tree that it verifies; None for chains of ``gamma`` drafts."""

    def num_nodes(self, gamma: int) -> int:
        """Returns the number of tokens of each row in one target call."""
        tree = self.tree(gamma)
        return gamma + 1 if tree is None else tree.num_nodes

    def chances(
        self,
        proposal: Proposal,
        target_logits: Float32[Array, "batch block vocab"],
        target_probs: Float32[Array, "batch block vocab"],
        settings: Sampling,
        verdict: Verdict,
    ) -> Float32[Array, "batch gamma"]:
        """Computes beta (Theorem 3.5), the chance that a draft is accepted after those before it.

        Its mean over the verified positions is alpha. It is that of token verification; a
        verifier of blocks accepts as much or more. The arguments are those of a call, and
        ``verdict`` its result.
        """
        return overlap_chances(proposal, target_logits, target_probs, settings)

    def verify_row(
        self,
        key: Key[Array, ""],
        emit_key: Key[Array, ""],
        draft_tokens: Int[Array, "gamma"],
        draft_probs: Float[Array, "gamma vocab"],
        target_probs: Float[Array, "gamma+1 vocab"],
    ) -> Verdict:
        """Verifies one row; the arguments are ``verification.token_verification``'s."""
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
        """Returns a verdict for each row.

        Args:
          stream: the source of the rows' random numbers.
          lengths: tokens that the rows hold.
          proposal: the draft's.
          target_logits: the target's, at each draft and after the last one.
          target_probs: the same after ``standardize``.
          settings: those of ``standardize``.
        """
        if settings.greedy:
            return self.verify_argmax(proposal, target_logits)
        emit_keys, accept_keys, _ = purpose_keys(stream, lengths)
        draft_probs = proposal.distributions(target_probs.shape[-1])
        if proposal.counts is not None:
            draft_probs = jax.vmap(mask_unproposed)(draft_probs, proposal.counts)
        return jax.vmap(self.verify_row)(
            accept_keys, emit_keys, proposal.tokens, draft_probs, target_probs
        )

    def verify_argmax(
        self, proposal: Proposal, target_logits: Float32[Array, "batch block vocab"]
    ) -> Verdict:
        """Verifies at temperature 0, where all lossless verifiers agree."""
        return jax.vmap(matching_verification)(
            proposal.tokens, argmax(target_logits), proposal.num_proposed
        )


def overlap_chances(
    proposal: Proposal,
    target_logits: Float32[Array, "batch block vocab"],
    target_probs: Float32[Array, "batch block vocab"],
    settings: Sampling,
    lenience: float = 1.0,
) -> Float32[Array, "batch gamma"]:
    """Computes ``sum min(p / l, q)`` at each draft: Theorem 3.5, and section A.5 for l.

    If all mass of p or q is on one token, there is no pass over the vocabulary.
    """
    gamma = proposal.tokens.shape[1]
    if settings.greedy:
        best = argmax(target_logits)[:, :gamma]
        if proposal.probs is None:
            return (proposal.tokens == best).astype(jnp.float32)
        return values_at(proposal.probs, best)
    if proposal.probs is None:
        return jnp.minimum(values_at(target_probs[:, :gamma], proposal.tokens) / lenience, 1.0)
    return overlap(target_probs / lenience, proposal.probs)


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

    def chances(self, proposal, target_logits, target_probs, settings, verdict) -> Array:
        """Computes the base's chances, by the lenience of argmax for rows at temperature 0."""
        given = (proposal, target_logits, target_probs, settings)
        if self.lenience == 1:
            return overlap_chances(*given)
        if settings.greedy:
            return self._chances_at_argmax(proposal, target_logits)
        sampled = overlap_chances(*given, self.lenience)
        if settings.temperature.ndim == 0:
            return sampled
        at_argmax = settings.temperature <= MIN_TEMPERATURE
        of_argmax = self._chances_at_argmax(proposal, target_logits)
        return jnp.where(at_argmax[:, None], of_argmax, sampled)

    def _chances_at_argmax(self, proposal: Proposal, target_logits: Array) -> Array:
        """Sums the draft's mass on the tokens that are likely enough."""
        target_logits = target_logits[:, : proposal.tokens.shape[1]]
        if proposal.probs is None:
            acceptable = functools.partial(lenient_argmax_acceptable, lenience=self.lenience)
            return jax.vmap(acceptable)(proposal.tokens, target_logits).astype(jnp.float32)
        own = jax.nn.softmax(target_logits, axis=-1)
        return formulas.beta_of_lenient_argmax(own, proposal.probs, self.lenience)

    def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs) -> Verdict:
        """Accepts while ``u l q(x) < p(x)``."""
        return token_verification(
            key, emit_key, draft_tokens, draft_probs, target_probs, self.lenience
        )

    def __call__(self, stream, lengths, proposal, target_logits, target_probs, settings) -> Verdict:
        """Verifies as the base does, by the lenience of argmax for rows at temperature 0."""
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
            proposal.tokens,
            target_logits,
            argmax(target_logits),
            proposal.num_proposed,
            self.lenience,
        )


@dataclasses.dataclass(frozen=True)
class BlockVerifier(Verifier):
    """Joint verification of a block: never accepts fewer than ``TokenVerifier`` in expectation."""

    def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs) -> Verdict:
        """Calls ``verification.block_verification``."""
        return block_verification(key, emit_key, draft_tokens, draft_probs, target_probs)


@dataclasses.dataclass(frozen=True)
class RejectionVerifier(Verifier):
    """Rejection sampling, the paper's comparison (section A.2)."""

    def chances(self, proposal, target_logits, target_probs, settings, verdict) -> Array:
        """Returns ``1 / M``, the same for every token (section A.2)."""
        if settings.greedy:
            # Where all mass of p is on one token, rejection accepts that token alone.
            return overlap_chances(proposal, target_logits, target_probs, settings)
        draft_probs = proposal.distributions(target_probs.shape[-1])
        return rejection_acceptance(target_probs[:, :-1], draft_probs)

    def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs) -> Verdict:
        """Calls ``verification.rejection_verification``."""
        return rejection_verification(key, emit_key, draft_tokens, draft_probs, target_probs)


@dataclasses.dataclass(frozen=True)
class CoupledVerifier(Verifier):
    """The same noise for draft and target: the text depends on the seed alone."""

    coupled: ClassVar[bool] = True

    def chances(self, proposal, target_logits, target_probs, settings, verdict) -> Array:
        """Returns 1 for accepted tokens, 0 for others: the noise leaves nothing to chance.

        The mean over all noises, which would take a sort of the vocabulary, is at most
        ``s = sum min(p, q)`` and at least ``s / (2 - s)`` (arXiv 2408.07978).
        """
        accepted = jnp.arange(proposal.tokens.shape[1])[None, :] < verdict.num_accepted[:, None]
        return accepted.astype(jnp.float32)

    def __call__(self, stream, lengths, proposal, target_logits, target_probs, settings) -> Verdict:
        """Accepts while the noise chooses the same token from both distributions."""

        def choose(offset, probs):
            return sample_coupled(stream, lengths + offset, probs, settings)

        offsets = jnp.arange(target_probs.shape[1])
        target_tokens = jax.vmap(choose, (0, 1), 1)(offsets, target_probs)
        return jax.vmap(matching_verification)(
            proposal.tokens, target_tokens, proposal.num_proposed
        )


@dataclasses.dataclass(frozen=True)
class TreeVerifier(Verifier):
    """Verification of several drafts for one position, in a static tree.

    The drafts are drawn without replacement; ``loops/speculative_tree.py`` verifies them.
    """

    # Drafts for the next positions; each is continued by one draft a position, up to gamma.
    widths: tuple[int, ...] = (2,)

    def __post_init__(self):
        object.__setattr__(self, "widths", tuple(self.widths))
        if not self.widths or min(self.widths) < 1:
            raise InputError(f"tree widths are {self.widths}: give at least 1 for each position")

    def tree(self, gamma: int) -> Tree:
        """Returns the tree of depth ``gamma``, at least 1."""
        if gamma < 1:
            raise InputError(f"gamma is {gamma}: a tree of drafts needs at least 1")
        return Tree((*self.widths, *[1] * (gamma - len(self.widths)))[:gamma])


VERIFIERS: dict[str, type[Verifier]] = {
    "token": TokenVerifier,
    "block": BlockVerifier,
    "coupled": CoupledVerifier,
    "rejection": RejectionVerifier,
    "multi": TreeVerifier,
    "tree": TreeVerifier,
}
# Drafts for each position by default.
DEFAULT_WIDTHS = {"multi": (3,), "tree": (3, 2)}


def verifier(name: str = "block", *, lenience: float = 1.0, widths: Sequence[int] = ()) -> Verifier:
    """Returns a verifier by its name.

    Args:
      name: a key of ``VERIFIERS``.
      lenience: for ``token`` alone, in (0, 1]; below 1 it is lossy (section A.5).
      widths: drafts for the next position (``multi``: one number) or positions (``tree``); empty
        takes ``DEFAULT_WIDTHS``.

    Raises:
      InputError: an unknown name, or settings that it does not have.
    """
    check_choice("verifier", name, VERIFIERS)
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
