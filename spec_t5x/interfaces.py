"""Protocols of targets and drafts: the loops use models only through their members.

A target *scores* new tokens, a draft *proposes* them. Both are pytrees (parameters are leaves),
so that they are arguments of a compiled function rather than constants in it.

Positions. A *row* is one sequence of the batch, ``[start token, token 1, token 2, …]``. The start
token is at position 0 and not counted in the row's length. A cache of length n holds positions
0 … n-1; the logits after feeding position n predict token n+1.
"""

import abc
import dataclasses
import numbers
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.errors import InputError, check_numbers, one_line
from spec_t5x.sampling.distributions import Sampling, values_at, write_rows
from spec_t5x.sampling.draws import Draws
from spec_t5x.sampling.rules import Places
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Bool, Float, Float32, Int, PyTree

# State of a target. A draft model's has ``lengths [batch]``, the number of cached positions.
Cache = Any
# State of a draft, which only the draft reads.
DraftState = Any
# Most tokens that a draft model proposes in an iteration if gamma is "auto" (``loops/pace.py``).
MAX_CHAIN = 8


@flax.struct.dataclass
class Proposal:
    """A draft's proposal for one iteration: up to gamma tokens for each row.

    ``Proposal(tokens)`` proposes tokens with probability 1, such as copies of the source;
    ``Proposal(tokens, probs, draws.drawn)`` proposes tokens drawn with ``Context.draws``.
    """

    # The proposed tokens.
    tokens: Int[Array, "batch gamma"]
    # The standardized distribution that each token was drawn from; the verifier receives this
    # very array. None if every token has probability 1, for example at temperature 0.
    probs: Float32[Array, "batch gamma vocab"] | None = None
    # Number of tokens drawn, ``Draws.drawn`` after the last of them; later tokens are not
    # proposed. Required with ``probs``, ignored without.
    drawn: Int[Array, ""] | int | None = None
    # Number of tokens that each row proposes, 0 … gamma; later ones are ignored. None means gamma
    # in every row. Whether token i is proposed may depend on the tokens before it, never on token
    # i, or the output would not follow the target's distribution.
    counts: Int[Array, "batch"] | None = None
    # ``Context.target_cache`` as the draft left it, if the draft wrote beyond the rows' lengths.
    # The target overwrites those positions in place. None if the draft did not write to it.
    target_cache: Cache | None = None

    @property
    def num_proposed(self) -> Int[Array, "batch"]:
        """Number of tokens that each row proposes: ``counts``, or gamma if it is None."""
        batch, gamma = self.tokens.shape
        return jnp.full(batch, gamma, jnp.int32) if self.counts is None else self.counts

    def distributions(self, vocab_size: int) -> Float32[Array, "batch gamma vocab"]:
        """Returns ``probs`` or, if it is None, the tokens' one-hot distributions."""
        if self.probs is None:
            return jax.nn.one_hot(self.tokens, vocab_size, dtype=jnp.float32)
        return self.probs

    def checked(self) -> "Proposal":
        """Returns the proposal without the tokens beyond ``drawn``; unchanged without ``probs``.

        Raises ``InputError`` for ``probs`` without ``drawn``, or an int ``drawn`` that is less than
        the tokens, without ``counts``.
        """
        drawn, num = self.drawn, self.tokens.shape[1]
        is_known = isinstance(drawn, int)
        if self.probs is None or is_known and drawn >= num:
            return self
        if drawn is None:
            raise InputError(
                "a proposal has probs and no drawn, the number of tokens drawn from them: give "
                "Proposal(tokens, probs, draws.drawn), or Proposal(tokens) if each token has "
                "probability 1"
            )
        if is_known and self.counts is None:
            raise InputError(
                f"a draft proposes {num} tokens and drew {drawn}: draw each with the draws that "
                "the previous `next` returned, and give the last draws' drawn"
            )
        return self.replace(counts=jnp.minimum(self.num_proposed, drawn))


@flax.struct.dataclass(kw_only=True)
class Context:
    """The texts, random draws, settings and target states that a draft may use when it proposes."""

    # Start token and tokens of each row; entries beyond its length are undefined.
    sequences: Int[Array, "batch width"]
    # Number of tokens after the start token: proposals follow ``sequences[b, :lengths[b] + 1]``.
    lengths: Int[Array, "batch"]
    # Mask of rows that have not ended; proposals of other rows are ignored. In a cascade a row may
    # become live again; its proposals must not depend on the calls in between.
    live: Bool[Array, "batch"]
    # The source of random numbers.
    draws: Draws
    # The target's sampling settings; a draft may use others (section 6 of the paper).
    settings: Sampling
    # The target's cache of positions 0 … lengths - 1. A draft may read it; a draft that writes to
    # later positions returns it (``Proposal.target_cache``).
    target_cache: Cache
    # At position i, up to each row's length, the target's last decoder state from which token i
    # was predicted, then the states of the layers in ``DraftTraits.depths``; zeros at position 0.
    # None unless ``DraftTraits.uses_target_states``.
    target_states: Float32[Array, "batch positions embed"] | None = None
    # Most tokens of a row that this iteration verifies; None means gamma. Later proposals are
    # ignored, so a draft that stops there saves time.
    limit: Int[Array, ""] | None = None
    # Each row's prompt length, and the length at which it ends at the latest, for the rules of
    # decoding; not needed (None) if ``settings.rules`` is None.
    starts: Int[Array, "batch"] | None = None
    limits: Int[Array, "batch"] | None = None

    def ruled(
        self,
        logits: Float[Array, "batch places vocab"],
        drafted: Int[Array, "batch drafted"],
        first: Int[Array, ""] | int = 0,
    ) -> Float[Array, "batch places vocab"]:
        """Applies ``settings.rules``, if any, to logits: place i follows ``first + i`` drafts."""
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
        """Applies the rules to logits: place i follows ``lengths + offsets[i]`` tokens of text."""
        places = Places(
            tokens=texts,
            lengths=self.lengths[:, None] + offsets[None, :],
            starts=self.starts,
            limits=self.limits,
        )
        return self.settings.rules(logits, places)

    def num_drafts(self, gamma: int) -> Int[Array, ""] | int:
        """Returns the number of tokens to propose: ``gamma``, or ``limit`` if it is smaller."""
        return gamma if self.limit is None else jnp.minimum(self.limit, gamma)

    @property
    def last_tokens(self) -> Int[Array, "batch"]:
        """Each row's last token, which proposals follow."""
        return values_at(self.sequences, self.lengths)


@flax.struct.dataclass(kw_only=True)
class Outcome:
    """Result of an iteration, from which the draft updates its state."""

    # Each row's length after the iteration's tokens were appended.
    lengths: Int[Array, "batch"]
    # Number of accepted proposals that were appended to each row.
    num_accepted: Int[Array, "batch"]
    # In a tree, the accepted node at each depth from 1; below the last accepted node, that node
    # again (0, the root, if none was). None for a chain.
    path: Int[Array, "batch depth"] | None = None


@flax.struct.dataclass(kw_only=True)
class TreeProposal:
    """A draft's proposal for one iteration as a tree: several tokens for one position.

    Nodes are numbered as in ``tree_shapes.Tree``; node 0 is the row's last token.
    """

    # Token of each node after node 0.
    tokens: Int[Array, "batch drafts"]
    # Distribution from which the children of each inner node were drawn without replacement.
    # None if every first child has probability 1, for example at temperature 0.
    probs: Float32[Array, "batch inner vocab"] | None
    # Number of levels that each row proposes, from 0 (nothing) to the tree's depth.
    depths: Int[Array, "batch"]


@runtime_checkable
class Target(Protocol):
    """The model whose output is wanted.

    ``docs/extending.md`` has an example; ``labs.testing.laws.check_target`` tests a target.
    """

    # Number of logits at each position, padding of the vocabulary included.
    vocab_size: int
    # Width of the decoder states that ``score`` returns.
    state_size: int
    # Number of positions that can be fed, the start token's included; None if unlimited.
    max_positions: int | None

    def prefill(
        self, inputs: PyTree, max_length: int, prompts: Int[Array, "batch width"] | None = None
    ) -> Cache:
        """Encodes ``inputs`` and returns a cache with room for ``max_length`` positions.

        Texts are tokens ``[batch, source]``; padding after them (0) must not change the logits.
        The cache holds ``prompts`` (start token first), of which each row's last token may be
        missing: the caller rolls back to each row's length. Without prompts the cache is empty.

        Every leaf of the cache has a leading batch axis, or the cache has a method
        ``repeat_rows(times)`` that returns a cache with each row repeated.
        """

    def score(
        self, cache: Cache, tokens: Int[Array, "batch new"], num: Int[Array, ""] | None = None
    ) -> tuple[Float32[Array, "batch new vocab"], Float[Array, "batch new embed"], Cache]:
        """Feeds new tokens at each row's length; returns logits and states after each, and cache.

        The states are those that the logits are computed from. The cache's entries at these
        positions are overwritten, since they may be of rejected tokens; ``rollback`` sets the new
        lengths. If ``num`` is given, a target may skip all but the first ``num`` tokens of a row.
        """

    def rollback(self, cache: Cache, lengths: Int[Array, "batch"]) -> Cache:
        """Returns the cache with each row's length set to ``lengths``."""


def check_positions(model: Target, max_decode_len: int, role: str = "target") -> None:
    """Raises ``InputError`` if ``model`` has too few positions, or lacks a member of ``Target``.

    The last token of a text is never fed, and drafts beyond it are dropped, so ``max_decode_len``
    positions are enough. ``role`` names the model in the message.
    """
    check_parts(model)
    if model.max_positions is not None and max_decode_len > model.max_positions:
        raise InputError(
            f"the {role} has {model.max_positions} positions and max_decode_len is "
            f"{max_decode_len}, the prompt included: lower it or shorten the prompt"
        )


def check_vocabularies(draft: "Target | Draft", target: Target) -> None:
    """Raises ``InputError`` unless both have the same ``vocab_size``."""
    if draft.vocab_size != target.vocab_size:
        raise InputError(
            f"the draft has {draft.vocab_size} tokens and the target {target.vocab_size} (of a "
            f"{type(draft).__name__} for a {type(target).__name__}): use models with one vocabulary"
        )


@flax.struct.dataclass(kw_only=True)
class Nodes:
    """New tokens of a tree, or of a search's hypotheses: several may be at one position.

    A cache is a set of *slots*, each for one token's keys and values. Plain decoding uses slot p
    for position p; here the caller chooses each token's slot, and the slots it attends to.
    """

    tokens: Int[Array, "batch nodes"]
    # Each token's position in its text; the start token's is 0.
    positions: Int[Array, "batch nodes"]
    # The slot to which each token's keys and values are written; distinct within a row.
    slots: Int[Array, "batch nodes"]
    # Text position of the token in each slot, once the new tokens are written.
    slot_positions: Int[Array, "batch slots"]
    # Mask of the slots that each token attends to: one for each position of its text up to its own.
    visible: Bool[Array, "batch nodes slots"]
    # True if each row's ``slots`` are consecutive, as in a tree, so that one in-place update
    # writes all of them.
    consecutive: bool = flax.struct.field(pytree_node=False, default=False)


@runtime_checkable
class NodeTarget(Target, Protocol):
    """A target that also scores trees and beams (``Nodes``)."""

    def num_slots(self, cache: Cache) -> int:
        """Returns the number of slots that the cache has for each row."""

    def score_nodes(
        self, cache: Cache, nodes: Nodes
    ) -> tuple[Float32[Array, "batch nodes vocab"], Float[Array, "batch nodes embed"], Cache]:
        """Writes new tokens to their slots; returns logits and states after each, and the cache.

        The cache's lengths are neither used nor changed.
        """

    def move(
        self, cache: Cache, slots: Int[Array, "batch nodes"], starts: Int[Array, "batch"]
    ) -> Cache:
        """Returns the cache with ``slots[b]`` copied to ``starts[b]`` and the slots after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTraits:
    """Static properties of a draft, which the loops are compiled for."""

    # True if the draft may propose fewer than gamma tokens: the target then scores only as many
    # positions as the longest proposal needs.
    varies: bool = False
    # Most tokens that an iteration proposes if gamma is "auto".
    max_worthwhile: int = MAX_CHAIN
    # True if the draft reads ``Context.target_states``, and the decoder layers (from 0) whose
    # states follow the last layer's there; layers need a target with ``showing(layers)``.
    uses_target_states: bool = False
    depths: tuple[int, ...] = ()

    def __post_init__(self):
        check_numbers(1, max_worthwhile=self.max_worthwhile)


@runtime_checkable
class Draft(Protocol):
    """Base class of drafts, which propose tokens for the target to verify.

    All but ``vocab_size`` and ``propose`` have defaults, for a draft without a state that always
    proposes gamma tokens. ``docs/extending.md`` has examples; ``labs.testing.laws.check_draft``
    tests a draft.
    """

    # Number of tokens, which must equal the target's.
    vocab_size: int
    traits: DraftTraits = DraftTraits()

    def check(self, target: Target, max_decode_len: int) -> None:
        """Raises ``InputError`` if the draft cannot serve ``target`` or texts of this length."""

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch length"], max_length: int
    ) -> DraftState:
        """Returns the state before the first proposal, with room for ``max_length`` positions.

        ``inputs`` and ``prompts`` are those of ``Target.prefill``. Every leaf of the state has a
        leading batch axis, except in caches that have the method ``repeat_rows``. A row may come
        from a state with less room, and has zeros beyond it.
        """
        return ()

    @abc.abstractmethod
    def propose(
        self, state: DraftState, context: Context, gamma: int
    ) -> tuple[Proposal, DraftState]:
        """Proposes up to ``gamma`` (>= 1) tokens for each row; also returns the new state."""

    def commit(self, state: DraftState, outcome: Outcome) -> DraftState:
        """Returns the state after verification, without the rejected tokens."""
        return state

    def catch_up(self, state: DraftState, context: Context, width: int) -> DraftState:
        """Returns the state after reading tokens that were appended without the draft.

        Loops with gamma "auto", and drafts that combine others, call this before ``propose``. A
        draft model feeds itself the missing tokens, ``width`` of each row in a call.
        """
        return state


@runtime_checkable
class TreeDraft(Draft, Protocol):
    """A draft that also proposes trees, and whose ``commit`` reads ``Outcome.path``."""

    def propose_tree(
        self, state: DraftState, context: Context, tree: Tree
    ) -> tuple[TreeProposal, DraftState]:
        """Proposes a token for each node after the root; also returns the new state."""


def check_fits(draft: Draft, target: Target, max_decode_len: int | None = None) -> None:
    """Raises ``InputError`` unless the draft fits the target, and texts of a given length."""
    # A draft of another package may have settings of another class.
    if isinstance(settings := getattr(draft, "settings", None), int | float | str):
        raise InputError(f"settings are {settings!r}: give distributions.sampling(…), or None")
    check_parts(draft, Draft, "derive it from interfaces.Draft")
    check_vocabularies(draft, target)
    if max_decode_len is not None:
        draft.check(target, max_decode_len)


def proposed(
    draft: Draft, state: DraftState, context: Context, size: int | Tree
) -> tuple[Proposal | TreeProposal, DraftState]:
    """Returns a draft's proposal of ``size``, gamma tokens or a tree, and its new state.

    Raises ``InputError`` if it is no such pair, or an array has another shape or type.
    """
    is_tree, who = isinstance(size, Tree), type(draft).__name__
    method, kind = ("propose_tree", TreeProposal) if is_tree else ("propose", Proposal)
    made = getattr(draft, method)(state, context, size)
    if not (isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], kind)):
        raise InputError(
            f"{who}.{method} returns a {type(made).__name__}: return a {kind.__name__} and a state"
        )
    proposal, (batch,) = made[0], context.lengths.shape
    # Gamma tokens at most.
    num = size.num_nodes - 1 if is_tree else min((*getattr(proposal.tokens, "shape", ())[1:], size))
    shapes = {
        "tokens": (jnp.integer, batch, num),
        "probs": (jnp.float32, batch, size.num_inner if is_tree else num, draft.vocab_size),
        "depths" if is_tree else "counts": (jnp.integer, batch),
    }
    for name, (dtype, *shape) in shapes.items():
        found = getattr(proposal, name)
        is_array = hasattr(found, "dtype")
        given = f"{found.dtype} {[*found.shape]}" if is_array else one_line(repr(found))
        fits = is_array and [*found.shape] == shape and jnp.issubdtype(found.dtype, dtype)
        if not (fits or found is None and name in ("probs", "counts")):
            raise InputError(f"{who} proposes {given} as {name}: give {dtype.__name__} {shape}")
    return proposal if is_tree else proposal.checked(), made[1]


def shown_to(draft: Draft, target: Target) -> Target:
    """Returns the target; its states include those of the layers in ``draft.traits.depths``."""
    depths = draft.traits.depths
    return target.showing(depths) if depths else target


def check_parts(model: Target | Draft, interface: type = Target, remedy: str = "") -> None:
    """Raises ``InputError`` unless ``model`` is a pytree with the members of ``interface``."""
    if jax.tree_util.all_leaves([model]):
        name = getattr(model, "__name__", type(model).__name__)
        what = "a class" if isinstance(model, type) else "no pytree"
        raise InputError(f"{name} is {what}: give an object of a flax.struct.dataclass")
    # The last three are Protocol and its bases.
    parts = interface.__mro__[:-3]
    static = [name for cls in parts for name in cls.__annotations__]
    children = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda node: node is not model)
    for path, child in children:
        is_array = hasattr(child, "dtype") or isinstance(child, numbers.Number)
        name = jax.tree_util.keystr(path, simple=True)
        if name in static or not is_array and jax.tree_util.all_leaves([child]):
            raise InputError(
                f"{type(model).__name__}.{name} is a leaf, which compiled code takes for an array: "
                "declare it with flax.struct.field(pytree_node=False)"
            )
    names = [*static, *(name for cls in parts for name in vars(cls))]
    names = dict.fromkeys(name for name in names if name[0] != "_" and not hasattr(model, name))
    if names:
        remedy = remedy or f"see interfaces.{interface.__name__}"
        raise InputError(f"{type(model).__name__} has no {', '.join(names)}: {remedy}")
