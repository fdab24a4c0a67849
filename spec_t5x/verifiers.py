"""Verifiers of whole batches, with their settings, by name.

A verifier is a frozen dataclass (a static argument of the compiled loop) that turns a proposal
and the target's distributions into a ``Verdict`` for each row. A new verifier is a subclass of
``Verifier`` with ``verify_row``:

    @dataclasses.dataclass(frozen=True)
    class FirstOnly(Verifier):
        \"\"\"Verification of the first draft alone.\"\"\"

        def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs):
            shorter = draft_probs.at[1:].set(0.0)  # as if nothing more were proposed
            return token_verification(key, emit_key, draft_tokens, shorter, target_probs)

    register("verifier", first="mypkg.verifiers:FirstOnly")  # a name in gin, T5X and Python
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from spec_t5x import registry
from spec_t5x.errors import InputError, as_input_error, check_choice, check_numbers, is_number
from spec_t5x.interfaces import Proposal
from spec_t5x.sampling import verification
from spec_t5x.sampling.distributions import MIN_TEMPERATURE, Sampling, argmax, overlap, values_at
from spec_t5x.sampling.draws import Stream, purpose_keys, sample_coupled
from spec_t5x.sampling.tree_shapes import MAX_NODES, Tree
from spec_t5x.sampling.verification import Verdict
from spec_t5x.types import Array, Float, Float32, Int, Key


@dataclasses.dataclass(frozen=True)
class Verifier:
    """Base class of verifiers."""

    # True if texts do not follow the target's distribution: a lossy rule, at any temperature.
    lossy: ClassVar[bool] = False
    # True if draft and target sample with the same noise at the same position.
    coupled: ClassVar[bool] = False
    # Verification of a node's children in a tree, at a temperature above 0.
    verify_node = staticmethod(verification.node_verification)

    def tree(self, gamma: int) -> Tree | None:
        """Returns the tree of depth ``gamma`` to verify; None for a chain of ``gamma`` drafts."""

    def num_nodes(self, gamma: int) -> int:
        """Returns the number of tokens that a target call scores in each row: gamma + 1 or more."""
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
        """Computes beta (Theorem 3.5), each draft's chance of acceptance after those before it.

        Beta is ``sum min(p, q)``, where p is the target's and q the draft's distribution; if p or q
        has all mass on one token, only that token is read. The mean of beta over the verified
        positions estimates alpha. This is token verification's beta; block verification accepts at
        least as much. ``verdict`` is ``__call__``'s result.
        """
        gamma = proposal.tokens.shape[1]
        if settings.greedy:
            best = argmax(target_logits)[:, :gamma]
            if proposal.probs is None:
                return (proposal.tokens == best).astype(jnp.float32)
            return values_at(proposal.probs, best)
        if proposal.probs is None:
            return jnp.minimum(values_at(target_probs[:, :gamma], proposal.tokens), 1.0)
        return overlap(target_probs, proposal.probs)

    def verify_row(
        self,
        key: Key[Array, ""],
        emit_key: Key[Array, ""],
        draft_tokens: Int[Array, "gamma"],
        draft_probs: Float[Array, "gamma vocab"],
        target_probs: Float[Array, "gamma+1 vocab"],
    ) -> Verdict:
        """Verifies one row; at temperature 0 ``verify_argmax`` verifies all rows instead.

        The arguments are those of ``verification.token_verification``.
        """
        raise InputError(f"{type(self).__name__} has no verify_row: see spec_t5x.verifiers")

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
          lengths: number of tokens in each row, which selects its random numbers.
          proposal: the draft's tokens and their distributions.
          target_logits: the target's logits at each draft and after the last (gamma + 1).
          target_probs: ``standardize(target_logits, settings)``.
          settings: the target's sampling settings.
        """
        if settings.greedy:
            return self.verify_argmax(proposal, target_logits)
        emit_keys, accept_keys, _ = purpose_keys(stream, lengths)
        draft_probs = proposal.distributions(target_probs.shape[-1])
        if proposal.counts is not None:
            draft_probs = jax.vmap(verification.mask_unproposed)(draft_probs, proposal.counts)
        verdict = jax.vmap(self.verify_row)(
            accept_keys, emit_keys, proposal.tokens, draft_probs, target_probs
        )
        if not self.lossy or settings.temperature.ndim == 0:
            return verdict
        # Rows at temperature 0 have the argmax rule even in a batch with sampled rows.
        at_argmax = settings.temperature <= MIN_TEMPERATURE
        of_argmax = self.verify_argmax(proposal, target_logits)
        return jax.tree.map(functools.partial(jnp.where, at_argmax), of_argmax, verdict)

    def verify_argmax(
        self, proposal: Proposal, target_logits: Float32[Array, "batch block vocab"]
    ) -> Verdict:
        """Accepts leading drafts that are the target's argmax: verification at temperature 0."""
        return jax.vmap(verification.matching_verification)(
            proposal.tokens, argmax(target_logits), proposal.num_proposed
        )


@dataclasses.dataclass(frozen=True)
class TokenVerifier(Verifier):
    """Token-by-token verification (Algorithm 1); lossy only if the lenience is below 1 (A.5)."""

    # l: multiplies the draft's probability in the comparison; 1 is lossless.
    lenience: float = 1.0

    def __post_init__(self):
        if not (is_number(self.lenience) and 0 < self.lenience <= 1):
            raise InputError(
                f"lenience is {self.lenience!r}: give a number above 0, at most 1 (1 is lossless)"
            )

    @property
    def lossy(self) -> bool:
        """True if the lenience is below 1."""
        return self.lenience < 1

    def chances(self, proposal, target_logits, target_probs, settings, verdict) -> Array:
        """Computes ``sum min(p / l, q)``; rows at temperature 0 have the argmax rule (A.5)."""
        lenient = target_probs / self.lenience
        sampled = super().chances(proposal, target_logits, lenient, settings, verdict)
        if not self.lossy or not (settings.greedy or settings.temperature.ndim):
            return sampled
        acceptable = verification.lenient_argmax(target_logits[:, :-1], self.lenience)
        mass = jnp.where(acceptable, proposal.distributions(target_logits.shape[-1]), 0.0)
        at_argmax = settings.greedy | (settings.temperature <= MIN_TEMPERATURE)
        return jnp.where(at_argmax.reshape(-1, 1), jnp.sum(mass, axis=-1), sampled)

    def verify_row(self, key, emit_key, draft_tokens, draft_probs, target_probs) -> Verdict:
        """Accepts leading drafts with ``u l q(x) < p(x)``; u is uniform in [0, 1)."""
        return verification.token_verification(
            key, emit_key, draft_tokens, draft_probs, target_probs, self.lenience
        )

    def verify_argmax(
        self, proposal: Proposal, target_logits: Float32[Array, "batch block vocab"]
    ) -> Verdict:
        """Accepts leading drafts that are the argmax or, if l < 1, have ``p(x) >= l max(p)``."""
        if not self.lossy:
            return super().verify_argmax(proposal, target_logits)
        likely = verification.lenient_argmax(target_logits[:, :-1], self.lenience)
        acceptable = values_at(likely, proposal.tokens)
        return jax.vmap(verification.accept_leading)(
            acceptable, argmax(target_logits), proposal.num_proposed
        )


@dataclasses.dataclass(frozen=True)
class BlockVerifier(Verifier):
    """Joint verification of all drafts: accepts at least ``TokenVerifier``'s number on average."""

    verify_row = staticmethod(verification.block_verification)


@dataclasses.dataclass(frozen=True)
class RejectionVerifier(Verifier):
    """Rejection sampling, with which the paper compares (section A.2)."""

    verify_row = staticmethod(verification.rejection_verification)

    def chances(self, proposal, target_logits, target_probs, settings, verdict) -> Array:
        """Returns ``1 / M`` at each draft, where M is the largest ``p / q`` (section A.2)."""
        draft_probs = proposal.distributions(target_probs.shape[-1])
        return verification.rejection_acceptance(target_probs[:, :-1], draft_probs)


@dataclasses.dataclass(frozen=True)
class CoupledVerifier(Verifier):
    """Verification with one noise for draft and target: texts depend on the seed alone."""

    coupled: ClassVar[bool] = True

    def chances(self, proposal, target_logits, target_probs, settings, verdict) -> Array:
        """Returns 1 for accepted drafts, 0 for others: given the noise, acceptance is certain.

        The expectation over noise, which would take a sort of the vocabulary, is at most
        ``s = sum min(p, q)`` and at least ``s / (2 - s)`` (arXiv 2408.07978).
        """
        accepted = jnp.arange(proposal.tokens.shape[1])[None, :] < verdict.num_accepted[:, None]
        return accepted.astype(jnp.float32)

    def __call__(self, stream, lengths, proposal, target_logits, target_probs, settings) -> Verdict:
        """Accepts leading drafts that equal the tokens which the target draws with the noise."""
        positions = lengths[:, None] + jnp.arange(target_probs.shape[1])[None, :]
        choose = jax.vmap(sample_coupled, (None, 1, 1, None), 1)
        target_tokens = choose(stream, positions, target_probs, settings)
        return jax.vmap(verification.matching_verification)(
            proposal.tokens, target_tokens, proposal.num_proposed
        )


@dataclasses.dataclass(frozen=True)
class TreeVerifier(Verifier):
    """Verification of several drafts for one position, in a static tree.

    The drafts are drawn without replacement. ``loops/speculative_tree.py`` verifies them by
    ``verify_node`` and no other method, at temperature 0 by the argmax.
    """

    # Children of each node at depths 0, 1, …; at further depths, up to gamma, a node has one child.
    widths: tuple[int, ...] = (2,)

    def __post_init__(self):
        object.__setattr__(self, "widths", tuple(self.widths))
        if not self.widths or min(self.widths) < 1:
            raise InputError(f"tree widths are {self.widths}: give at least 1 for each position")

    def tree(self, gamma: int) -> Tree:
        """Returns the tree of depth ``gamma``; raises ``InputError`` if it is too deep or large."""
        check_numbers(1, gamma=gamma)
        # A deeper one has too many nodes, too.
        more = min(gamma, MAX_NODES) - len(self.widths)
        return Tree((*self.widths, *[1] * more)[:gamma])


# Depth and nodes of the largest trees with gamma "auto".
_AUTO_DEPTH = 4
_AUTO_NODES = 64


def largest_limit(verifier: Verifier, of_chains: int) -> int:
    """Returns the most drafts with gamma "auto": ``of_chains``, or the depth of the largest tree.

    Raises ``InputError`` if a tree of all of the verifier's widths is too deep or too large.
    """
    if verifier.tree(1) is None:
        return of_chains
    widths = getattr(verifier, "widths", ())
    for depth in range(_AUTO_DEPTH, max(len(widths), 1) - 1, -1):
        # A tree of too many nodes for any target has no number.
        with contextlib.suppress(InputError):
            if verifier.num_nodes(depth) <= _AUTO_NODES:
                return depth
    raise InputError(
        f"widths are {widths} and gamma is auto, which takes trees of up to {_AUTO_DEPTH} widths "
        f"and {_AUTO_NODES} nodes: give gamma a number, or fewer widths"
    )


# ``TreeVerifier.widths`` by the name of the verifier, if none are given.
DEFAULT_WIDTHS = {"multi": (3,), "tree": (3, 2)}


def verifier(name: str = "block", *, lenience: float = 1.0, widths: Sequence[int] = ()) -> Verifier:
    """Returns the verifier that is registered as ``name``.

    Args:
      lenience: only for ``token``, in (0, 1]; below 1 is lossy (section A.5).
      widths: ``TreeVerifier.widths``, only for ``multi`` (one number), ``tree`` and other classes
        of ``TreeVerifier``; empty takes ``DEFAULT_WIDTHS`` or the class's.

    Raises:
      InputError: an unknown name, a setting that it does not have, or a field without default.
    """
    check_choice("verifier", name, registry.names("verifier"))
    if not isinstance(widths, tuple | list):
        raise InputError(f"widths is {widths!r}: give a list, as in ({widths!r},)")
    # Made for every name, because the constructor checks the range of ``lenience``.
    token = TokenVerifier(lenience)
    if lenience != 1 and name != "token":
        raise InputError(f"lenience is {lenience} and verifier {name!r}: use 1, or verifier token")
    kind = registry.find("verifier", name)
    if not (isinstance(kind, type) and issubclass(kind, Verifier)):
        raise InputError(f"verifier {name!r} is registered as {kind!r}: give a class of Verifier")
    if widths and not issubclass(kind, TreeVerifier):
        raise InputError(f"widths are {tuple(widths)} and verifier {name!r}: use multi or tree")
    if name == "multi" and len(widths) > 1:
        raise InputError(f"widths are {tuple(widths)}: multi takes one number, tree several")
    if name == "token":
        return token
    widths = tuple(widths) or DEFAULT_WIDTHS.get(name, ())
    with as_input_error(f"verifier {name!r} cannot be made", "give its fields defaults", TypeError):
        return kind(widths=widths) if widths else kind()
