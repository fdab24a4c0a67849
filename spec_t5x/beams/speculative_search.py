"""Speculative beam search: the plain search's result in fewer target calls (A.4).

One iteration, for all rows at once:

    propose   the draft runs gamma steps of beam search of its own, from the true live
              hypotheses and their true log-probabilities: gamma levels of a tree
    score     ONE target call over the live hypotheses' last tokens and the whole tree
    replay    the search's own update from the target's scores, level by level, for as
              long as every live hypothesis is a node of the tree

What is committed stays where it is in both caches; the rest of the tree is overwritten
by the next one. The first step of the replay needs nothing of the tree, so that each
call makes at least one step of the search, and at most ``gamma + 1``. In the paper's
words: a level is accepted if ``top_w(M_p)`` is a subset of ``top_u(M_q)``, where w is
``beams`` and u is ``draft_beams``; a call is over ``w + u * gamma`` tokens.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.beams import cache_slots, search
from spec_t5x.beams import hypotheses as beams_lib
from spec_t5x.beams.hypotheses import BeamResult, Beams, BeamStats, Continuations, Ranking
from spec_t5x.beams.search import SearchState, done
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Cache, Nodes, Target, check_vocabularies
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.sampling.rules import Rules
from spec_t5x.types import EOS_ID, PAD_ID, Array, Bool, EndOfSequence, Float, Float32, Int, PyTree

# The parent of a live hypothesis's last token: no node.
_NO_NODE = -1


@flax.struct.dataclass(kw_only=True)
class BeamTree:
    """Hypotheses, each by its last token: one level of a tree, or the whole of it.

    The whole has the live hypotheses first, then gamma levels of ``draft_beams`` nodes
    that the draft expects to be live after 1, 2, … steps. (The leading axis is that of
    levels of one size, before they are joined.)
    """

    tokens: Int[Array, "*levels batch nodes"]
    # The node of the whole tree that each continues; -1 for a live hypothesis and for
    # an empty place.
    parents: Int[Array, "*levels batch nodes"]
    # The live hypotheses' own log-probability, and what the draft adds to it; minus
    # infinity for an empty place.
    log_probs: Float32[Array, "*levels batch nodes"]
    # Each token's position in the text, its place there, and the places of the whole
    # hypothesis (``cache_slots.py``).
    positions: Int[Array, "*levels batch nodes"]
    places: Int[Array, "*levels batch nodes"]
    lineages: Int[Array, "*levels batch nodes positions"]
    # Start token and tokens of each hypothesis, for the rules of decoding; None without rules.
    sequences: Int[Array, "*levels batch nodes width"] | None = None

    def nodes(self, width: int) -> Nodes:
        """What ``score_nodes`` takes, for ``width`` places at a position."""
        return cache_slots.nodes(self.tokens, self.positions, self.places, self.lineages, width)


def step(
    target: Target,
    draft_model: Target,
    state: SearchState,
    ranking: Ranking,
    *,
    gamma: int,
    draft_beams: int,
    rules: Rules | None = None,
    eos_id: EndOfSequence = EOS_ID,
) -> SearchState:
    """One iteration: 1 to ``gamma + 1`` steps of the search for each row that goes on."""
    tree, draft_cache = propose(
        draft_model, state, gamma=gamma, width=draft_beams, rules=rules, eos_id=eos_id
    )
    logits, _, target_cache = target.score_nodes(state.target_cache, tree.nodes(draft_beams))
    num = beams_lib.num_candidates(state.beams.live_log_probs.shape[1], eos_id)
    following = _continuations(state.beams, tree, logits, num, rules)
    beams, lineages, steps = replay(state, tree, following, ranking, eos_id)
    return SearchState(
        beams=beams,
        lineages=lineages,
        target_cache=target_cache,
        draft_cache=_feed_last_level(
            draft_model, draft_cache, tree, draft_beams, jnp.any(steps > gamma)
        ),
        stats=BeamStats(
            target_calls=state.stats.target_calls + ~state.beams.ended,
            steps=state.stats.steps + steps,
        ),
    )


def _continuations(
    beams: Beams, nodes: BeamTree, logits: Array, num: int, rules: Rules | None
) -> Continuations:
    """The likeliest tokens after each node, by the rules of decoding."""
    if rules is None:
        return beams_lib.continuations(logits, num)
    places = beams.places(nodes.sequences, nodes.positions)
    return beams_lib.continuations(logits, num, rules, places)


def _live_hypotheses(state: SearchState, width: int, with_texts: bool) -> BeamTree:
    """The live hypotheses, whose last tokens are about to be cached.

    And empty places: as many nodes as a level that the draft proposes.
    """
    beams = state.beams
    batch, num = beams.live_log_probs.shape

    def widen(values, fill):
        extra = [(0, 0)] * values.ndim
        extra[1] = (0, width - num)
        return jnp.pad(values, extra, constant_values=fill)

    places = jnp.arange(width)
    return BeamTree(
        tokens=widen(beams.last_tokens, PAD_ID),
        parents=jnp.full((batch, width), _NO_NODE),
        log_probs=widen(beams.live_log_probs, -jnp.inf),
        positions=jnp.tile(beams.lengths[:, None], (1, width)),
        places=jnp.tile(places[None], (batch, 1)),
        lineages=cache_slots.settle(widen(state.lineages, 0), beams.lengths, places),
        sequences=widen(beams.live_sequences, PAD_ID) if with_texts else None,
    )


def propose(
    draft_model: Target,
    state: SearchState,
    *,
    gamma: int,
    width: int,
    eos_id: EndOfSequence,
    rules: Rules | None = None,
) -> tuple[BeamTree, Cache]:
    """The live hypotheses and the ``gamma`` levels to follow them, if the draft is right.

    Levels have ``width`` nodes. The draft's cache comes back with all of them but the last
    one in it.
    """
    batch, num_live = state.beams.live_log_probs.shape
    live = _live_hypotheses(state, width, with_texts=rules is not None)

    def grow(carry, first_parent):
        level, cache = carry
        logits, _, cache = draft_model.score_nodes(cache, level.nodes(width))
        num = beams_lib.num_candidates(width, eos_id)
        following = _continuations(state.beams, level, logits, num, rules)
        found = beams_lib.candidates(level.log_probs, following)
        level = _next_level(level, beams_lib.going_on(found, width, eos_id), first_parent)
        return (level, cache), level

    # The number, in the whole tree, of the first node of each level that is grown from.
    first_nodes = [0, *(num_live + width * depth for depth in range(gamma - 1))]
    (_, cache), levels = lax.scan(grow, (live, state.draft_cache), jnp.asarray(first_nodes))

    def join(live, levels):
        levels = jnp.moveaxis(levels, 0, 1).reshape(batch, gamma * width, *live.shape[2:])
        return jnp.concatenate([live[:, :num_live], levels], axis=1)

    return jax.tree.map(join, live, levels), cache


def _next_level(level: BeamTree, expected: beams_lib.Candidates, first_parent) -> BeamTree:
    """The nodes that continue a level, whose own nodes are numbered from ``first_parent``."""
    batch, num = expected.tokens.shape
    places = jnp.arange(num)
    # All of a level are at the same position.
    positions = level.positions[:, 0] + 1
    lineages = beams_lib.pick(level.lineages, expected.parents)
    is_one = expected.log_probs > -jnp.inf
    sequences = level.sequences
    if sequences is not None:
        sequences = beams_lib.continued(sequences, expected, positions)
    return BeamTree(
        tokens=expected.tokens,
        # What is none must not be taken for a child of another level's node.
        parents=jnp.where(is_one, first_parent + expected.parents, _NO_NODE),
        log_probs=expected.log_probs,
        positions=jnp.tile(positions[:, None], (1, num)),
        places=jnp.tile(places[None], (batch, 1)),
        lineages=cache_slots.settle(lineages, positions, places),
        sequences=sequences,
    )


def replay(
    state: SearchState,
    tree: BeamTree,
    following: Continuations,
    ranking: Ranking,
    eos_id: EndOfSequence,
) -> tuple[Beams, Int[Array, "batch beams positions"], Int[Array, "batch"]]:
    """The steps of the plain search that the scored tree covers.

    ``following`` are the continuations of all its nodes, by the target. Returns the hypotheses,
    the live ones' lineages, and how many steps each row has taken.
    """

    def one_step(carry):
        beams, lineages, nodes, covered, steps = carry
        extended, parents = beams_lib.extend(
            beams,
            jax.tree.map(lambda leaf: beams_lib.pick(leaf, nodes), following),
            ranking,
            eos_id,
        )
        parent_nodes = beams_lib.pick(nodes, parents)
        beams, lineages = beams_lib.where_rows(
            covered, (extended, beams_lib.pick(tree.lineages, parent_nodes)), (beams, lineages)
        )
        nodes, found = _find(tree, parent_nodes, beams.last_tokens)
        is_known = jnp.all(found | (beams.live_log_probs == -jnp.inf), axis=1)
        return beams, lineages, nodes, covered & is_known & ~beams.ended, steps + covered

    batch, num_live = state.beams.live_log_probs.shape
    start = (
        state.beams,
        state.lineages,
        # The node of each live hypothesis: the first ones.
        jnp.tile(jnp.arange(num_live)[None], (batch, 1)),
        # Rows whose live hypotheses are all nodes of the tree.
        ~state.beams.ended,
        jnp.zeros(batch, jnp.int32),
    )
    # It stops by itself after gamma + 1 steps: nothing in the tree continues its last level.
    beams, lineages, _, _, steps = lax.while_loop(lambda carry: jnp.any(carry[3]), one_step, start)
    return beams, lineages, steps


def _find(
    tree: BeamTree, parents: Int[Array, "batch beams"], tokens: Int[Array, "batch beams"]
) -> tuple[Int[Array, "batch beams"], Bool[Array, "batch beams"]]:
    """The node that continues each parent with its token, and whether there is one."""
    is_it = (tree.parents[:, None, :] == parents[:, :, None]) & (
        tree.tokens[:, None, :] == tokens[:, :, None]
    )
    return jnp.argmax(is_it, axis=2).astype(jnp.int32), jnp.any(is_it, axis=2)


def _feed_last_level(
    draft_model: Target, cache: Cache, tree: BeamTree, draft_beams: int, was_reached: Array
) -> Cache:
    """Feeds the draft the level that it proposed but did not need to go on from.

    Only where a row's text now goes through it.
    """
    last = jax.tree.map(lambda leaf: leaf[:, -draft_beams:], tree)

    def feed(cache):
        return draft_model.score_nodes(cache, last.nodes(draft_beams))[2]

    return lax.cond(was_reached, feed, lambda cache: cache, cache)


@outputs_lib.refuses_holes
@functools.partial(
    jax.jit, static_argnames=("beams", "gamma", "draft_beams", "max_decode_len", "eos_id")
)
def speculative_beam_search(
    target: Target,
    draft_model: Target,
    inputs: PyTree,
    prompts: Int[Array, "batch prompt"],
    *,
    beams: int,
    gamma: int,
    draft_beams: int | None = None,
    alpha: float | Float[Array, ""] = 0.6,
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None = None,
    eos_id: EndOfSequence = EOS_ID,
    ranking: Ranking | None = None,
    rules: Rules | None = None,
) -> BeamResult:
    """What ``beam_search`` finds with the target, in fewer of its calls.

    The same hypotheses in the same order, whatever the draft: it decides how many steps
    of the search each call makes (``BeamResult.stats``).

    Args:
      target, inputs, prompts, beams, alpha, max_decode_len, max_decode_steps, eos_id: as of
        ``beam_search``; ``inputs`` are what both models' ``prefill`` take.
      draft_model: a smaller one of the same kind, over the same vocabulary.
      gamma: levels that the draft proposes in each iteration, at least 1.
      draft_beams: hypotheses in each of them, at least ``beams`` (None takes as many).
        More of them are more likely to have all of the target's among them.
      ranking, rules: as of ``beam_search``; the draft's own search keeps the same rules.

    Raises:
      InputError: ``beams`` below 1 or ``draft_beams`` below ``beams``, either above half
        of the vocabulary, ``gamma`` below 1, vocabularies that differ, prompts longer
        than ``max_decode_len``, or a model without ``score_nodes``.
    """
    draft_beams = beams if draft_beams is None else draft_beams
    search.check_arguments(target, prompts, beams, max_decode_len, eos_id)
    check_draft(target, draft_model, beams, gamma, draft_beams, eos_id)
    levels = {"gamma": gamma, "draft_beams": draft_beams}
    state = search.init(
        target,
        inputs,
        prompts,
        beams=beams,
        max_decode_len=max_decode_len,
        max_decode_steps=max_decode_steps,
        draft_model=draft_model,
        **levels,
    )
    ranking = ranking or Ranking(exponent=alpha)
    common = {"ranking": ranking, "rules": rules, "eos_id": eos_id}
    body = functools.partial(step, target, draft_model, **common, **levels)
    state = lax.while_loop(lambda state: ~done(state), body, state)
    return beams_lib.finish(state.beams, state.stats)


def check_draft(
    target: Target,
    draft_model: Target,
    beams: int,
    gamma: int,
    draft_beams: int,
    eos_id: EndOfSequence,
) -> None:
    """Raises ``InputError`` for a draft, or settings of it, that cannot be used."""
    cache_slots.check_scores_nodes(draft_model)
    if gamma < 1:
        raise InputError(
            f"gamma is {gamma}: give at least 1, or search without a draft (beam_search)"
        )
    if draft_beams < beams:
        raise InputError(
            f"draft_beams is {draft_beams} and beams is {beams}: give at least as many"
        )
    check_vocabularies(draft_model, target)
    beams_lib.check_beams("draft_beams", draft_beams, draft_model.vocab_size, eos_id)
