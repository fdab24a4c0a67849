"""What the loops ask of models. Anything that fits these Protocols can be decoded.

The loops import nothing else of a model: a target is anything that can *score*
new tokens, a draft anything that can *propose* them. Both are pytrees (parameters
are leaves), so they are passed into a compiled function rather than closed over.

Positions. A row's sequence is ``[start token, token 1, token 2, …]``; position 0 is
the start token. "Length" counts the tokens after it. A cache of length n holds
positions 0 … n-1; the logits after feeding position n predict token n+1.
"""

import abc
import dataclasses
import inspect
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.errors import InputError
from spec_t5x.sampling.distributions import Sampling, check_float32, values_at, write_rows
from spec_t5x.sampling.draws import Draws
from spec_t5x.sampling.rules import Places, Rules, apply
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Bool, Float, Float32, Int, PyTree

# Whatever a target keeps. A draft's own model has ``lengths`` in it, the tokens of each row
# that it holds.
Cache = Any
# Whatever a draft keeps.
DraftState = Any
# Tokens that a model drafts for an iteration at most, where their number follows what pays.
MAX_CHAIN = 8


@flax.struct.dataclass
class Proposal:
    """What a draft proposes for one iteration.

    Tokens that it is certain of, such as copies: ``Proposal(tokens)``. Tokens drawn with
    ``Context.draws``: ``Proposal(tokens, probs, draws.drawn)``.
    """

    # The proposed tokens.
    tokens: Int[Array, "batch gamma"]
    # The distributions they were drawn from, after standardization: what the verifier
    # must see. None where all mass is on the tokens: at temperature 0, for one.
    probs: Float32[Array, "batch gamma vocab"] | None = None
    # How many were drawn, each with the draws that the one before it left: those left at
    # the end know. Tokens beyond are not proposed. For distributions alone.
    drawn: Int[Array, ""] | int | None = None
    # How many tokens each row proposes, 0 … gamma; what lies beyond is ignored. None is
    # gamma in every row.
    # Whether to propose a token may depend on the tokens before it, never on itself.
    counts: Int[Array, "batch"] | None = None
    # The context's target cache, of a draft that wrote to it beyond the rows' lengths: the
    # target writes there again, and nobody copies what the draft has changed. None where
    # it is as it was.
    target_cache: Cache | None = None

    @property
    def num_proposed(self) -> Int[Array, "batch"]:
        """How many tokens each row proposes."""
        batch, gamma = self.tokens.shape
        return jnp.full(batch, gamma, jnp.int32) if self.counts is None else self.counts

    def distributions(self, vocab_size: int) -> Float32[Array, "batch gamma vocab"]:
        """What each token was drawn from, written out."""
        if self.probs is None:
            return jax.nn.one_hot(self.tokens, vocab_size, dtype=jnp.float32)
        return self.probs

    def checked(self) -> "Proposal":
        """The part of it that may be verified.

        Raises:
          InputError: distributions that are not float32, or from which fewer tokens were
            drawn than are proposed.
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
        if not isinstance(self.drawn, int):
            return self._at_most(jnp.minimum(self.drawn, gamma))
        if self.counts is None and self.drawn < gamma:
            raise InputError(
                f"a draft proposes {gamma} tokens and drew {self.drawn}: draw each with the draws "
                "that the last `next` returned, and give the drawn of those left at the end"
            )
        return self if self.drawn >= gamma else self._at_most(self.drawn)

    def _at_most(self, bound) -> "Proposal":
        return self.replace(counts=jnp.minimum(self.num_proposed, bound))


@flax.struct.dataclass(kw_only=True)
class Context:
    """What a draft may look at when it proposes."""

    # Start token and text of each row; positions beyond the length hold anything.
    sequences: Int[Array, "batch width"]
    # Tokens after the start token: proposals follow ``sequences[b, :lengths[b] + 1]``.
    lengths: Int[Array, "batch"]
    # Rows that are still being written; the others' proposals are ignored.
    live: Bool[Array, "batch"]
    # What to sample with.
    draws: Draws
    # The target's settings; a draft may have its own (section 6).
    settings: Sampling
    # The target's cache, which holds positions 0 … lengths - 1. To read; a draft that
    # writes beyond them hands it on (``Proposal.target_cache``).
    target_cache: Cache
    # The target's last decoder state that each token, up to position lengths, was predicted
    # from, and behind it those of the draft's ``depths``; zeros for the start token. None unless
    # the draft ``uses_target_states``.
    target_states: Float32[Array, "batch positions embed"] | None = None
    # Drafts of a row that may be verified; None for all gamma. A draft that stops there
    # saves time, and what others propose beyond is ignored.
    limit: Int[Array, ""] | None = None
    # The prompts' lengths, and those at which rows end at the latest. The rules of decoding ask
    # for them; None where there is no rule.
    starts: Int[Array, "batch"] | None = None
    limits: Int[Array, "batch"] | None = None

    @property
    def rules(self) -> Rules | None:
        """The rules of decoding, which hold for draft and target alike."""
        return self.settings.rules

    def ruled(
        self,
        logits: Float[Array, "batch places vocab"],
        drafted: Int[Array, "batch drafted"],
        first: Int[Array, ""] | int = 0,
    ) -> Float[Array, "batch places vocab"]:
        """The logits by the rules of decoding, after ``first``, ``first + 1``, … drafted tokens."""
        if self.rules is None:
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
        """The logits by the rules, each after so many of the tokens drafted in its text."""
        places = Places(
            tokens=texts,
            lengths=self.lengths[:, None] + offsets[None, :],
            starts=self.starts,
            limits=self.limits,
        )
        return apply(self.rules, logits, places)

    def num_drafts(self, gamma: int) -> Int[Array, ""] | int:
        """How many tokens are worth proposing, of ``gamma``."""
        return gamma if self.limit is None else jnp.minimum(self.limit, gamma)

    @property
    def last_tokens(self) -> Int[Array, "batch"]:
        """Each row's last token, which proposals follow."""
        return values_at(self.sequences, self.lengths)

    @property
    def last_states(self) -> Float32[Array, "batch embed"]:
        """The states that the last tokens were predicted from."""
        at_last = self.lengths[:, None, None]
        return jnp.take_along_axis(self.target_states, at_last, axis=1)[:, 0]


@flax.struct.dataclass(kw_only=True)
class Outcome:
    """The outcome of verification, for the draft."""

    # The rows' lengths now.
    lengths: Int[Array, "batch"]
    # Proposals that the verifier accepted.
    num_accepted: Int[Array, "batch"]


@flax.struct.dataclass(kw_only=True)
class TreeProposal:
    """What a draft proposes when several drafts may stand for one position.

    Nodes are numbered as in ``tree_shapes.Tree``; node 0 is the row's last token.
    """

    # The token of each node but the first.
    tokens: Int[Array, "batch drafts"]
    # For each node that has children: what they were drawn from, without replacement.
    # None where all mass is on the first child: at temperature 0, for one.
    probs: Float32[Array, "batch inner vocab"] | None
    # How many levels of drafts each row proposes: 0 for nothing, the tree's depth for all.
    depths: Int[Array, "batch"]


@runtime_checkable
class Target(Protocol):
    """A model whose output is wanted.

    ``docs/extending.md`` has an example; ``testing.laws.check_target`` tests one of your own.
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
        ``repeat_rows(times)`` that gives the cache of so many rows of each row. Where a row is
        given to another input, all of it is replaced, or what the cache's own method
        ``insert_rows(new, move)`` replaces (``loops.refill.Move``).
        """

    def score(
        self,
        cache: Cache,
        tokens: Int[Array, "batch new"],
        num: Int[Array, ""] | None = None,
    ) -> tuple[Float32[Array, "batch new vocab"], Float[Array, "batch new embed"], Cache]:
        """Feeds new tokens at each row's length: logits and states after each, longer cache.

        The states are what the logits were made from, for drafts that go on from them. What the
        cache holds there is overwritten: it may be of tokens that were rejected. Only the first
        ``num`` tokens of each row matter, if it is given; a target that can saves the rest.
        """

    def rollback(self, cache: Cache, lengths: Int[Array, "batch"]) -> Cache:
        """The cache with each row's length set to ``lengths``."""


def check_positions(model: Target, max_decode_len: int, role: str = "target") -> None:
    """Raises ``InputError`` for texts that a target, or a draft's model, has no positions for.

    The last of ``max_decode_len`` tokens is never fed. What drafts there are beyond it is
    thrown away, whatever it was given as its position.
    """
    check_parts(model)
    if model.max_positions is not None and max_decode_len > model.max_positions:
        raise InputError(
            f"the {role} has {model.max_positions} positions and max_decode_len is "
            f"{max_decode_len}, the prompt included: lower it or shorten the prompt"
        )


def check_vocabularies(draft: "Target | Draft", target: "Target | Draft", *roles: str) -> None:
    """Raises ``InputError`` unless two models, of these roles, have as many tokens."""
    if draft.vocab_size != target.vocab_size:
        of_draft, of_target = roles or ("draft", "target")
        raise InputError(
            f"the {of_draft} has {draft.vocab_size} tokens and the {of_target} "
            f"{target.vocab_size}: use models with one vocabulary"
        )


@flax.struct.dataclass(kw_only=True)
class Nodes:
    """New tokens that do not all follow one another: a tree, or a beam's hypotheses.

    A cache is a set of *slots*. Plain decoding keeps position p in slot p; here it is
    for the caller to say which slot holds what, and who may look at it.
    """

    tokens: Int[Array, "batch nodes"]
    # Each token's position in its text; the start token's is 0.
    positions: Int[Array, "batch nodes"]
    # Where its keys and values are written: distinct in each row.
    slots: Int[Array, "batch nodes"]
    # Place in its text of what each slot holds, the new tokens included.
    slot_positions: Int[Array, "batch slots"]
    # The slots of each token's own text, itself included: one for each position of the text.
    visible: Bool[Array, "batch nodes slots"]
    # Whether each row's slots follow one another, as in a tree: writing them is then one
    # update, for which XLA copies nothing.
    consecutive: bool = flax.struct.field(pytree_node=False, default=False)


@runtime_checkable
class NodeTarget(Target, Protocol):
    """A target that scores trees of tokens."""

    def num_slots(self, cache: Cache) -> int:
        """How many tokens of a row the cache has room for."""

    def score_nodes(
        self, cache: Cache, nodes: Nodes
    ) -> tuple[Float32[Array, "batch nodes vocab"], Float[Array, "batch nodes embed"], Cache]:
        """Feeds new tokens to their slots: logits and states after each, and the written cache.

        The cache's lengths have no meaning here, and stay as they are.
        """

    def move(
        self, cache: Cache, slots: Int[Array, "batch nodes"], starts: Int[Array, "batch"]
    ) -> Cache:
        """The cache with the contents of ``slots`` copied to the slots from ``starts`` on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTraits:
    """A draft's properties that the loops are compiled for."""

    # Whether it may propose fewer than gamma tokens: the target is then asked for as many
    # positions as the longest proposal needs.
    varies: bool = False
    # Most tokens that it is asked for where their number follows what pays.
    max_worthwhile: int = MAX_CHAIN
    # Whether ``Context.target_states`` is wanted, and of which decoder layers of the target,
    # from 0, behind the last one's (for a target with ``showing(layers)``, such as ``T5Model``).
    uses_target_states: bool = False
    depths: tuple[int, ...] = ()


@runtime_checkable
class Draft(Protocol):
    """Anything that proposes the tokens that may come next.

    To derive drafts of your own from: all but ``vocab_size`` and ``propose`` has a default, for
    a draft that keeps nothing between iterations and always proposes gamma tokens.
    ``docs/extending.md`` has examples; ``testing.laws.check_draft`` tests one of your own.
    """

    # Must equal the target's.
    vocab_size: int
    traits: DraftTraits = DraftTraits()

    def check(self, target: Target, max_decode_len: int) -> None:
        """Raises ``InputError`` where it cannot draft for this target, or texts of this length."""

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch length"], max_length: int
    ) -> DraftState:
        """State before the first proposal; ``prompts`` start with the start token.

        Every leaf of the state leads with the batch axis, but in caches that repeat their
        rows themselves (see ``Target.prefill``).
        """
        return ()

    @abc.abstractmethod
    def propose(
        self, state: DraftState, context: Context, gamma: int
    ) -> tuple[Proposal, DraftState]:
        """Proposes up to ``gamma`` tokens, at least 1, to follow each row's text."""

    def commit(self, state: DraftState, outcome: Outcome) -> DraftState:
        """Told what became of the proposal: forget what was rejected."""
        return state

    def catch_up(self, state: DraftState, context: Context, width: int) -> DraftState:
        """Told that the text may have gone on without it, before it is asked to propose.

        By whoever lets others write: a pace, a draft that asks others first. Where a model
        has to be fed what is missing, ``width`` tokens of each row at a time, for which the
        state has room.
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
        """As ``commit``, told the node at each depth that the verifier went through.

        Beyond ``outcome.num_accepted`` the path repeats its last node.
        """


def shown_to(draft: Draft, target: Target) -> Target:
    """The target, with the states that a draft wants."""
    depths = draft.traits.depths
    return target.showing(depths) if depths else target


def check_parts(model: Target | Draft, interface: type = Target) -> None:
    """Raises ``InputError`` if a target or a draft lacks a part that the loops use."""
    kind, names = interface.__name__, [*interface.__annotations__, *vars(interface)]
    missing = [name for name in dict.fromkeys(names) if name[0] != "_" and not hasattr(model, name)]
    arguments = {"prefill": "prompts", "score": "num"} if interface is Target else {}
    for method, argument in arguments.items():
        function = getattr(model, method, None)
        if callable(function) and argument not in inspect.signature(function).parameters:
            missing.append(f"{method}(…, {argument}=None)")
    if missing:
        raise InputError(
            f"{type(model).__name__} has no {', '.join(missing)}: see interfaces.{kind}"
            + (", from which drafts are derived" if interface is Draft else "")
        )
    flags = [each.name for each in dataclasses.fields(DraftTraits) if hasattr(model, each.name)]
    if interface is Draft and flags:
        raise InputError(
            f"{type(model).__name__} has {', '.join(flags)}: give it as "
            f"traits = DraftTraits({flags[0]}=…), of interfaces"
        )
