"""The interfaces of models. The loops decode anything that fits these Protocols.

A target *scores* new tokens, a draft *proposes* them. Both are pytrees (parameters are leaves),
so that they are arguments of a compiled function rather than constants in it.

Positions. A row's sequence is ``[start token, token 1, token 2, …]``; position 0 is the start
token. "Length" counts the tokens after it. A cache of length n holds positions 0 … n-1; the
logits after feeding position n predict token n+1.
"""

import abc
import dataclasses
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.errors import InputError
from spec_t5x.sampling.distributions import Sampling, check_float32, values_at, write_rows
from spec_t5x.sampling.draws import Draws
from spec_t5x.sampling.rules import Places, apply
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Bool, Float, Float32, Int, PyTree

# A target's own state. The cache of a draft's model has ``lengths``, the number of each row's
# tokens in it.
Cache = Any
# A draft's own state.
DraftState = Any
# Tokens that a model drafts for an iteration at most, where a pace chooses their number.
MAX_CHAIN = 8


@flax.struct.dataclass
class Proposal:
    """A draft's proposal for one iteration.

    ``Proposal(tokens)`` has tokens that the draft is certain of, such as copies;
    ``Proposal(tokens, probs, draws.drawn)`` tokens drawn with ``Context.draws``.
    """

    # The proposed tokens.
    tokens: Int[Array, "batch gamma"]
    # The distributions they were drawn from, after standardization: the verifier must use the
    # same arrays. None where all mass is on the tokens, for example at temperature 0.
    probs: Float32[Array, "batch gamma vocab"] | None = None
    # Number of tokens drawn, each with the draws that the one before it left. Tokens beyond are
    # not proposed. Ignored without ``probs``.
    drawn: Int[Array, ""] | int | None = None
    # Number of tokens that each row proposes, 0 … gamma; those beyond are ignored. None is gamma
    # in every row. Whether a token is proposed may depend on the tokens before it, never on
    # itself.
    counts: Int[Array, "batch"] | None = None
    # The context's target cache, if the draft wrote to it beyond the rows' lengths: the target
    # writes there again, and nothing is copied. None if the draft left it as it was.
    target_cache: Cache | None = None

    @property
    def num_proposed(self) -> Int[Array, "batch"]:
        """Number of tokens that each row proposes."""
        batch, gamma = self.tokens.shape
        return jnp.full(batch, gamma, jnp.int32) if self.counts is None else self.counts

    def distributions(self, vocab_size: int) -> Float32[Array, "batch gamma vocab"]:
        """Returns each token's distribution, written out where all mass is on the token."""
        if self.probs is None:
            return jax.nn.one_hot(self.tokens, vocab_size, dtype=jnp.float32)
        return self.probs

    def checked(self) -> "Proposal":
        """Returns the part of the proposal that may be verified.

        Raises:
          InputError: distributions that are not float32, or from which fewer tokens were drawn
            than are proposed.
        """
        gamma = self.tokens.shape[1]
        if self.probs is None:
            return self
        check_float32(self.probs, "a proposal's probs")
        if self.drawn is None:
            raise InputError(
                "a proposal has probs and not how many tokens were drawn from them: give "
                "Proposal(tokens, probs, draws.drawn), or Proposal(tokens) of a draft that is "
                "certain of them"
            )
        is_known = isinstance(self.drawn, int)
        if is_known and self.counts is None and self.drawn < gamma:
            raise InputError(
                f"a draft proposes {gamma} tokens and drew {self.drawn}: draw each with the draws "
                "that the last `next` returned, and give the drawn of those left at the end"
            )
        if is_known and self.drawn >= gamma:
            return self
        bound = self.drawn if is_known else jnp.minimum(self.drawn, gamma)
        return self.replace(counts=jnp.minimum(self.num_proposed, bound))


@flax.struct.dataclass(kw_only=True)
class Context:
    """The text and settings that a draft may use when it proposes."""

    # Start token and text of each row; positions beyond the length hold anything.
    sequences: Int[Array, "batch width"]
    # Tokens after the start token: proposals follow ``sequences[b, :lengths[b] + 1]``.
    lengths: Int[Array, "batch"]
    # Rows that have not ended; the others' proposals are ignored.
    live: Bool[Array, "batch"]
    # The source of random numbers.
    draws: Draws
    # The target's settings; a draft may have its own (section 6).
    settings: Sampling
    # The target's cache, which holds positions 0 … lengths - 1. A draft may read it; one that
    # writes beyond them returns it (``Proposal.target_cache``).
    target_cache: Cache
    # The target's last decoder state that each token, up to position lengths, was predicted
    # from, followed by those of the draft's ``depths``; zeros for the start token. None unless
    # the draft ``uses_target_states``.
    target_states: Float32[Array, "batch positions embed"] | None = None
    # Number of a row's tokens that may be verified; None for gamma. Proposals beyond are ignored,
    # and a draft that stops there saves time.
    limit: Int[Array, ""] | None = None
    # The prompts' lengths, and those at which rows end at the latest, for the rules of decoding;
    # None where there is no rule.
    starts: Int[Array, "batch"] | None = None
    limits: Int[Array, "batch"] | None = None

    def ruled(
        self,
        logits: Float[Array, "batch places vocab"],
        drafted: Int[Array, "batch drafted"],
        first: Int[Array, ""] | int = 0,
    ) -> Float[Array, "batch places vocab"]:
        """Applies the rules to the logits after ``first``, ``first + 1``, … drafted tokens."""
        if self.settings.rules is None:
            return logits
        sequences = write_rows(self.sequences, drafted, self.lengths + 1)
        offsets = first + jnp.arange(logits.shape[1])
        return self.ruled_texts(logits, sequences[:, None], offsets)

    def ruled_texts(
        self,
        logits: Float[Array, "batch places vocab"],
        texts: Int[Array, "batch #places width"],
        offsets: Int[Array, "places"],
    ) -> Float[Array, "batch places vocab"]:
        """Applies the rules to logits, each after ``offsets`` of its text's drafted tokens."""
        places = Places(
            tokens=texts,
            lengths=self.lengths[:, None] + offsets[None, :],
            starts=self.starts,
            limits=self.limits,
        )
        return apply(self.settings.rules, logits, places)

    def num_drafts(self, gamma: int) -> Int[Array, ""] | int:
        """Returns how many of ``gamma`` tokens are worth proposing: at most ``limit``."""
        return gamma if self.limit is None else jnp.minimum(self.limit, gamma)

    @property
    def last_tokens(self) -> Int[Array, "batch"]:
        """Each row's last token, which proposals follow."""
        return values_at(self.sequences, self.lengths)


@flax.struct.dataclass(kw_only=True)
class Outcome:
    """The outcome of verification, for the draft."""

    # The rows' new lengths.
    lengths: Int[Array, "batch"]
    # Proposals that the verifier accepted.
    num_accepted: Int[Array, "batch"]


@flax.struct.dataclass(kw_only=True)
class TreeProposal:
    """A draft's proposal of several tokens for one position.

    Nodes are numbered as in ``tree_shapes.Tree``; node 0 is the row's last token.
    """

    # The token of each node but the first.
    tokens: Int[Array, "batch drafts"]
    # The distribution, for each node that has children, that they were drawn from without
    # replacement. None where all mass is on the first child, for example at temperature 0.
    probs: Float32[Array, "batch inner vocab"] | None
    # Levels of drafts that each row proposes: 0 for nothing, the tree's depth for all.
    depths: Int[Array, "batch"]


@runtime_checkable
class Target(Protocol):
    """A model whose output is wanted.

    ``docs/extending.md`` has an example; ``testing.laws.check_target`` tests a target.
    """

    # Number of logits, padding of the vocabulary included.
    vocab_size: int
    # Width of the states that ``score`` returns.
    state_size: int
    # Tokens of a text that can be fed, the start token included; None for any number.
    max_positions: int | None

    def prefill(
        self, inputs: PyTree, max_length: int, prompts: Int[Array, "batch width"] | None = None
    ) -> Cache:
        """Encodes ``inputs`` and makes a cache for ``max_length`` tokens, ``prompts`` in it.

        The prompts start with the start token, and every row's last token may be missing: the
        caller rolls back to each row's length. Without prompts the cache is empty.

        Every leaf of the cache leads with the batch axis, or the cache has a method
        ``repeat_rows(times)`` that returns a cache with each row repeated. If a row is given to
        another input, all of it is replaced, or the part that the cache's own method
        ``insert_rows(new, move)`` replaces (``loops.refill.Move``).
        """

    def score(
        self, cache: Cache, tokens: Int[Array, "batch new"], num: Int[Array, ""] | None = None
    ) -> tuple[Float32[Array, "batch new vocab"], Float[Array, "batch new embed"], Cache]:
        """Feeds new tokens at each row's length; returns logits and states after each, and cache.

        The states are those that the logits are computed from. Entries of the cache at these
        positions are overwritten: they may belong to rejected tokens. If ``num`` is given, only
        the first ``num`` tokens of each row matter, and a target may skip the others.
        """

    def rollback(self, cache: Cache, lengths: Int[Array, "batch"]) -> Cache:
        """Returns the cache with each row's length set to ``lengths``."""


def check_positions(model: Target, max_decode_len: int, role: str = "target") -> None:
    """Raises ``InputError`` if texts need more positions than a target, or draft's model, has.

    The last of ``max_decode_len`` tokens is never fed, and drafts beyond it are dropped.
    """
    check_parts(model)
    if model.max_positions is not None and max_decode_len > model.max_positions:
        raise InputError(
            f"the {role} has {model.max_positions} positions and max_decode_len is "
            f"{max_decode_len}, the prompt included: lower it or shorten the prompt"
        )


def check_vocabularies(
    draft: "Target | Draft", target: "Target | Draft", of_draft="draft", of_target="target"
) -> None:
    """Raises ``InputError``, which names the roles, unless both models have as many tokens."""
    if draft.vocab_size != target.vocab_size:
        raise InputError(
            f"the {of_draft} has {draft.vocab_size} tokens and the {of_target} "
            f"{target.vocab_size}: use models with one vocabulary"
        )


@flax.struct.dataclass(kw_only=True)
class Nodes:
    """New tokens that do not all follow one another: a tree, or a beam's hypotheses.

    A cache is a set of *slots*. Plain decoding keeps position p in slot p; here the caller
    decides which slot holds which token, and which tokens attend to it.
    """

    tokens: Int[Array, "batch nodes"]
    # Each token's position in its text; the start token's is 0.
    positions: Int[Array, "batch nodes"]
    # The slot of each token's keys and values: distinct in each row.
    slots: Int[Array, "batch nodes"]
    # Position in its text of each slot's token, the new ones included.
    slot_positions: Int[Array, "batch slots"]
    # The slots of each token's own text, itself included: one for each position of the text.
    visible: Bool[Array, "batch nodes slots"]
    # Whether each row's slots follow one another, as in a tree: writing them is then one update,
    # for which XLA copies nothing.
    consecutive: bool = flax.struct.field(pytree_node=False, default=False)


@runtime_checkable
class NodeTarget(Target, Protocol):
    """A target that scores trees of tokens."""

    def num_slots(self, cache: Cache) -> int:
        """Returns the number of tokens of a row that the cache has room for."""

    def score_nodes(
        self, cache: Cache, nodes: Nodes
    ) -> tuple[Float32[Array, "batch nodes vocab"], Float[Array, "batch nodes embed"], Cache]:
        """Feeds new tokens to their slots; returns logits and states after each, and the cache.

        The cache's lengths have no meaning here, and stay as they are.
        """

    def move(
        self, cache: Cache, slots: Int[Array, "batch nodes"], starts: Int[Array, "batch"]
    ) -> Cache:
        """Returns the cache with ``slots`` copied to the slots from ``starts`` on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTraits:
    """A draft's properties that the loops are compiled for."""

    # Whether it may propose fewer than gamma tokens: the target then scores as many positions as
    # the longest proposal needs.
    varies: bool = False
    # The most tokens of a proposal, where a pace chooses their number.
    max_worthwhile: int = MAX_CHAIN
    # Whether ``Context.target_states`` is wanted, and of which decoder layers of the target,
    # from 0, after the last one's (for a target with ``showing(layers)``, such as ``T5Model``).
    uses_target_states: bool = False
    depths: tuple[int, ...] = ()


@runtime_checkable
class Draft(Protocol):
    """Base class of drafts, which propose the tokens that may come next.

    All but ``vocab_size`` and ``propose`` have defaults, for a draft without a state that always
    proposes gamma tokens. ``docs/extending.md`` has examples; ``testing.laws.check_draft`` tests
    a draft.
    """

    # Must equal the target's.
    vocab_size: int
    traits: DraftTraits = DraftTraits()

    def check(self, target: Target, max_decode_len: int) -> None:
        """Raises ``InputError`` if the draft does not fit this target, or texts of this length."""

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch length"], max_length: int
    ) -> DraftState:
        """Returns the state before the first proposal; ``prompts`` start with the start token.

        Every leaf of the state leads with the batch axis, except in caches that repeat their rows
        themselves (see ``Target.prefill``).
        """
        return ()

    @abc.abstractmethod
    def propose(
        self, state: DraftState, context: Context, gamma: int
    ) -> tuple[Proposal, DraftState]:
        """Proposes up to ``gamma`` tokens, at least 1, to follow each row's text."""

    def commit(self, state: DraftState, outcome: Outcome) -> DraftState:
        """Returns the state after verification, without what was rejected."""
        return state

    def catch_up(self, state: DraftState, context: Context, width: int) -> DraftState:
        """Returns the state for a text that may have grown without the draft.

        A loop at a pace, or a draft that calls others first, calls this before ``propose``. A model
        is fed the missing tokens, ``width`` of each row at a time: its state has room for them.
        """
        return state


@runtime_checkable
class TreeDraft(Draft, Protocol):
    """A draft that also proposes trees."""

    def propose_tree(
        self, state: DraftState, context: Context, tree: Tree
    ) -> tuple[TreeProposal, DraftState]:
        """Proposes a token for each node of the tree."""

    def commit_tree(
        self, state: DraftState, outcome: Outcome, path: Int[Array, "batch depth"]
    ) -> DraftState:
        """Returns the state after verification accepted the nodes of ``path``, one at each depth.

        Beyond ``outcome.num_accepted`` the path repeats its last node.
        """


def shown_to(draft: Draft, target: Target) -> Target:
    """Returns the target, whose states include those of the draft's ``traits.depths``."""
    depths = draft.traits.depths
    return target.showing(depths) if depths else target


def check_parts(model: Target | Draft, interface: type = Target) -> None:
    """Raises ``InputError`` if a target or a draft lacks a part that the loops use."""
    names = dict.fromkeys([*interface.__annotations__, *vars(interface)])
    missing = [name for name in names if name[0] != "_" and not hasattr(model, name)]
    if missing:
        raise InputError(
            f"{type(model).__name__} has no {', '.join(missing)}: see interfaces."
            f"{interface.__name__}"
            + (", from which drafts are derived" if interface is Draft else "")
        )
