"""Beam search, plain or speculative: T5X's result, in fewer target calls (section A.4).

One iteration, for all rows at once:

    propose   the draft makes gamma steps of a beam search, from the true live hypotheses
              and their true log-probabilities: gamma levels of a tree
    score     ONE target call over the live hypotheses' last tokens and the whole tree
    replay    the search's own update (``hypotheses.py``) from the target's scores, level by
              level, while every live hypothesis is a node of the tree

All hypotheses of an input share one row of the cache and one encoded source. Committed tokens
are never moved in the cache (``cache_slots.py``), and the next tree overwrites the others. The
first step of the replay needs no draft: each call makes 1 to ``gamma + 1`` steps of the search,
and gamma 0 is plain beam search. In the paper's words, a level is accepted if ``top_w(M_p)`` is
a subset of ``top_u(M_q)``, where w is ``beams`` and u is ``draft_beams``; a call is over
``w + u * gamma`` tokens.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x import interfaces
from spec_t5x.beams import cache_slots
from spec_t5x.beams import hypotheses as beams_lib
from spec_t5x.errors import InputError, check_numbers
from spec_t5x.interfaces import Cache, Nodes, NodeTarget, Target
from spec_t5x.loops import arguments, compiled
from spec_t5x.sampling.rules import Places, Rules
from spec_t5x.types import EOS_ID, PAD_ID, Array, Bool, EndOfSequence, Float32, Int, PyTree

# Parent of nodes that continue no other node: live hypotheses and empty entries.
_NO_NODE = -1
_REMEDY = "use a model that has them, such as T5Model"


@flax.struct.dataclass(kw_only=True)
class SearchState:
    """State of a search between two iterations."""

    # Live and finished hypotheses.
    beams: beams_lib.Beams
    # Places (``cache_slots``) of the live hypotheses' tokens but the last ones, in both caches.
    lineages: Int[Array, "batch beams positions"]
    target_cache: Cache
    # None in a plain search.
    draft_cache: Cache | None
    stats: beams_lib.BeamStats


@flax.struct.dataclass(kw_only=True)
class BeamTree:
    """Nodes of a tree of hypotheses, each a hypothesis's last token: one level, or the whole tree.

    The whole tree has the live hypotheses first, then gamma levels of ``draft_beams`` nodes that
    the draft expects to be live after 1, 2, … steps. (A scan stacks levels on a leading axis.)
    """

    tokens: Int[Array, "*levels batch nodes"]
    # Index in the whole tree of the node that each continues; -1 for a live hypothesis and for an
    # empty entry.
    parents: Int[Array, "*levels batch nodes"]
    # Log-probability of the live hypothesis by the target plus that of later tokens by the draft;
    # minus infinity for an empty entry.
    log_probs: Float32[Array, "*levels batch nodes"]
    # Each token's position in the text, and its hypothesis's lineage, its own place included.
    positions: Int[Array, "*levels batch nodes"]
    lineages: Int[Array, "*levels batch nodes positions"]
    # Start token and tokens of each hypothesis, for the rules of decoding; None without rules.
    sequences: Int[Array, "*levels batch nodes width"] | None

    def nodes(self, width: int) -> Nodes:
        """Returns the argument of ``score_nodes``, for ``width`` places at a position."""
        return cache_slots.nodes(self.tokens, self.positions, self.lineages, width)


@compiled.jit(
    check=arguments.check_given,
    static_argnames=("beams", "gamma", "draft_beams", "max_decode_len", "eos_id"),
)
def beam_search(
    target: Target,
    inputs: PyTree,
    prompts: Int[Array, "batch prompt"],
    *,
    beams: int,
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None = None,
    eos_id: EndOfSequence = EOS_ID,
    ranking: beams_lib.Ranking | None = None,
    rules: Rules | None = None,
    draft_model: Target | None = None,
    gamma: int = 0,
    draft_beams: int | None = None,
) -> beams_lib.BeamResult:
    """Finds the ``beams`` best texts for each input by the search of T5X.

    The hypotheses and their order do not depend on the draft, which decides how many steps of
    the search each target call makes (``BeamResult.stats``).

    Args:
      target: the model, a pytree that has ``score_nodes``.
      inputs, prompts, max_decode_steps: as in ``speculative_decode``.
      beams: hypotheses kept, and returned, for each input.
      max_decode_len, eos_id: as in ``Loop``.
      ranking: rules of scores and ends; None takes T5X's, ``Ranking()``. Another exponent needs no
        compilation.
      rules: which tokens may follow a text (``sampling.rules.rules``).
      draft_model: a smaller model with the same vocabulary; its own search keeps the same rules.
      gamma: levels that the draft proposes in each iteration; 0 is plain beam search.
      draft_beams: hypotheses in each level, at least ``beams`` (None takes as many). More of them
        are more likely to include all of the target's.

    Raises:
      InputError: ``beams`` below 1 or ``draft_beams`` below ``beams``, either above half of the
        vocabulary (less for several ``eos_id``), ``gamma`` below 0, 0 with a draft or above 0
        without one, long prompts, different vocabularies, no ``score_nodes``, too few positions.
    """
    width = beams if draft_beams is None else draft_beams
    search = _Search(
        target=target,
        draft_model=draft_model,
        gamma=gamma,
        width=width,
        ranking=ranking or beams_lib.Ranking(),
        rules=rules,
        eos_id=eos_id,
    )
    search.check(prompts, beams, max_decode_len)
    hypotheses = beams_lib.start(prompts, beams, max_decode_len, max_decode_steps)
    state = search.init(inputs, prompts, hypotheses, max_decode_len)
    state = lax.while_loop(lambda state: ~jnp.all(state.beams.ended), search.step, state)
    return beams_lib.finish(state.beams, state.stats)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Search:
    """Settings of a search; the methods are the parts of an iteration."""

    target: Target
    draft_model: Target | None
    gamma: int
    # Number of nodes in a level, and of places at a position.
    width: int
    ranking: beams_lib.Ranking
    rules: Rules | None
    eos_id: EndOfSequence

    def check(self, prompts: Array, beams: int, max_decode_len: int) -> None:
        """Raises ``InputError`` for arguments that cannot be searched with."""
        target, draft_model, gamma = self.target, self.draft_model, self.gamma
        interfaces.check_parts(target, NodeTarget, _REMEDY)
        if getattr(target, "prefix_lm", False):
            raise InputError(
                "prefix_lm is True: a search reads prompts causally; sample, or set it False"
            )
        check_numbers(0, gamma=gamma, max_decode_len=max_decode_len)
        if not gamma and (draft_model is not None or self.width != beams):
            raise InputError("gamma is 0, which uses no draft_model or draft_beams: leave them out")
        beams_lib.check_beams(target.vocab_size, self.eos_id, beams=beams)
        arguments.check_prompts(prompts, max_decode_len)
        interfaces.check_positions(target, max_decode_len)
        if not gamma:
            return
        if draft_model is None:
            raise InputError(f"gamma is {gamma} and there is no draft_model: give one, or gamma 0")
        interfaces.check_parts(draft_model, NodeTarget, _REMEDY)
        interfaces.check_vocabularies(draft_model, target)
        interfaces.check_positions(draft_model, max_decode_len, "draft")
        beams_lib.check_beams(target.vocab_size, self.eos_id, beams, draft_beams=self.width)

    def init(self, inputs: PyTree, prompts: Array, beams: beams_lib.Beams, max_decode_len: int):
        """Encodes inputs and feeds prompts, if gamma > 0 for the draft too; returns the state."""
        batch, num = beams.live_log_probs.shape
        # An ended row may be at position max_decode_len, and its last tree reaches gamma further.
        room = max_decode_len + self.gamma + 1
        zeros = jnp.zeros(batch, jnp.int32)

        def prefill(model):
            return cache_slots.prefill(model, inputs, prompts, room, self.width)

        return SearchState(
            beams=beams,
            # A prompt's tokens are at the first places.
            lineages=jnp.zeros((batch, num, room), jnp.int32),
            target_cache=prefill(self.target),
            draft_cache=prefill(self.draft_model) if self.gamma else None,
            stats=beams_lib.BeamStats(target_calls=zeros, steps=zeros),
        )

    def step(self, state: SearchState) -> SearchState:
        """Makes one iteration: 1 to ``gamma + 1`` steps of the search for each live row."""
        tree, draft_cache = self.propose(state)
        logits, _, target_cache = self.target.score_nodes(
            state.target_cache, tree.nodes(self.width)
        )
        num_live = state.beams.live_log_probs.shape[1]
        following = self.continuations(state.beams, tree, logits, num_live)
        beams, lineages, steps = self.replay(state, tree, following)
        if self.gamma:
            draft_cache = self.feed_last_level(draft_cache, tree, jnp.any(steps > self.gamma))
        return SearchState(
            beams=beams,
            lineages=lineages,
            target_cache=target_cache,
            draft_cache=draft_cache,
            stats=beams_lib.BeamStats(
                target_calls=state.stats.target_calls + ~state.beams.ended,
                steps=state.stats.steps + steps,
            ),
        )

    def propose(self, state: SearchState) -> tuple[BeamTree, Cache | None]:
        """Returns the tree: the live hypotheses, then the ``gamma`` levels that the draft expects.

        Also returns the draft's cache, which has all levels but the last; None if gamma is 0.
        """
        batch, num_live = state.beams.live_log_probs.shape
        live = self.live_hypotheses(state)
        if not self.gamma:
            return live, None

        def grow(carry, first_parent):
            level, cache = carry
            logits, _, cache = self.draft_model.score_nodes(cache, level.nodes(self.width))
            following = self.continuations(state.beams, level, logits, self.width)
            found = beams_lib.candidates(level.log_probs, following)
            found = beams_lib.live_candidates(found, self.width, self.eos_id)
            level = _next_level(level, found, first_parent)
            return (level, cache), level

        # The number, in the whole tree, of the first node of each level that is grown from.
        firsts = [0, *(num_live + self.width * depth for depth in range(self.gamma - 1))]
        (_, cache), levels = lax.scan(grow, (live, state.draft_cache), jnp.asarray(firsts))

        def join(live, levels):
            levels = jnp.moveaxis(levels, 0, 1).reshape(batch, -1, *live.shape[2:])
            return jnp.concatenate([live[:, :num_live], levels], axis=1)

        return jax.tree.map(join, live, levels), cache

    def live_hypotheses(self, state: SearchState) -> BeamTree:
        """Returns a level of ``width`` nodes: the live hypotheses, then empty entries."""
        beams, places = state.beams, jnp.arange(self.width)
        batch, num = beams.live_log_probs.shape

        def widen(values, fill):
            extra = [(0, 0), (0, self.width - num), *[(0, 0)] * (values.ndim - 2)]
            return jnp.pad(values, extra, constant_values=fill)

        return BeamTree(
            tokens=widen(beams.last_tokens, PAD_ID),
            parents=jnp.full((batch, self.width), _NO_NODE),
            log_probs=widen(beams.live_log_probs, -jnp.inf),
            positions=jnp.tile(beams.lengths[:, None], (1, self.width)),
            lineages=cache_slots.settle(widen(state.lineages, 0), beams.lengths, places),
            sequences=None if self.rules is None else widen(beams.live_sequences, PAD_ID),
        )

    def continuations(
        self, beams: beams_lib.Beams, nodes: BeamTree, logits: Array, num: int
    ) -> beams_lib.Continuations:
        """Returns the likeliest tokens after each node by the rules, for ``num`` hypotheses."""
        places = None
        if self.rules is not None:
            starts, limits = beams.starts, beams.limits
            places = Places(
                tokens=nodes.sequences, lengths=nodes.positions, starts=starts, limits=limits
            )
        num = beams_lib.num_candidates(num, self.eos_id)
        return beams_lib.continuations(logits, num, self.rules, places)

    def replay(
        self, state: SearchState, tree: BeamTree, following: beams_lib.Continuations
    ) -> tuple[beams_lib.Beams, Int[Array, "batch beams positions"], Int[Array, "batch"]]:
        """Makes the steps of the plain search that the scored tree covers.

        ``following`` are the target's continuations of all nodes. Returns the hypotheses after
        the steps, the live ones' lineages, and the number of steps of each row.
        """

        def one_step(carry):
            beams, lineages, nodes, covered, steps = carry
            extended, parents = beams_lib.extend(
                beams, beams_lib.pick(following, nodes), self.ranking, self.eos_id
            )
            parents = beams_lib.pick(nodes, parents)
            beams, lineages = beams_lib.where_rows(
                covered, (extended, beams_lib.pick(tree.lineages, parents)), (beams, lineages)
            )
            nodes, found = _find(tree, parents, beams.last_tokens)
            is_known = jnp.all(found | (beams.live_log_probs == -jnp.inf), axis=1)
            return beams, lineages, nodes, covered & is_known & ~beams.ended, steps + covered

        batch, num_live = state.beams.live_log_probs.shape
        # The live hypotheses are the first nodes. A row is covered while its live ones are nodes.
        nodes = jnp.tile(jnp.arange(num_live)[None], (batch, 1))
        covered, steps = ~state.beams.ended, jnp.zeros(batch, jnp.int32)
        carry = state.beams, state.lineages, nodes, covered, steps
        if self.gamma:
            # At most gamma + 1 steps: no node continues the tree's last level.
            carry = lax.while_loop(lambda carry: jnp.any(carry[3]), one_step, carry)
        else:
            carry = one_step(carry)
        beams, lineages, _, _, steps = carry
        return beams, lineages, steps

    def feed_last_level(self, cache: Cache, tree: BeamTree, is_reached: Bool[Array, ""]) -> Cache:
        """Feeds the draft the tree's last level if a row has reached it; returns its cache."""
        last = jax.tree.map(lambda leaf: leaf[:, -self.width :], tree)

        def feed(cache):
            return self.draft_model.score_nodes(cache, last.nodes(self.width))[2]

        return lax.cond(is_reached, feed, lambda cache: cache, cache)


def _next_level(
    level: BeamTree, expected: beams_lib.Candidates, first_parent: Int[Array, ""]
) -> BeamTree:
    """Returns the level of ``expected``, after one whose first node is number ``first_parent``."""
    # All nodes of a level are at the same position.
    positions = level.positions[:, 0] + 1
    lineages = beams_lib.pick(level.lineages, expected.parents)
    is_one = expected.log_probs > -jnp.inf
    sequences = level.sequences
    if sequences is not None:
        sequences = beams_lib.candidate_sequences(sequences, expected, positions)
    return BeamTree(
        tokens=expected.tokens,
        # An empty entry must not be taken for a child of another level's node.
        parents=jnp.where(is_one, first_parent + expected.parents, _NO_NODE),
        log_probs=expected.log_probs,
        positions=jnp.broadcast_to(positions[:, None], expected.tokens.shape),
        lineages=cache_slots.settle(lineages, positions, jnp.arange(lineages.shape[1])),
        sequences=sequences,
    )


def _find(
    tree: BeamTree, parents: Int[Array, "batch beams"], tokens: Int[Array, "batch beams"]
) -> tuple[Int[Array, "batch beams"], Bool[Array, "batch beams"]]:
    """Returns the node that continues each parent with its token, and the mask of those found."""
    is_it = (tree.parents[:, None, :] == parents[:, :, None]) & (
        tree.tokens[:, None, :] == tokens[:, :, None]
    )
    return jnp.argmax(is_it, axis=2).astype(jnp.int32), jnp.any(is_it, axis=2)
