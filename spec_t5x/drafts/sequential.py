"""Drafting with a model, one token after the other or level by level: what drafts share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.interfaces import Cache, Context, NodeTarget, Proposal, Target, TreeProposal
from spec_t5x.loops.tree_nodes import ruled_nodes, tree_nodes
from spec_t5x.sampling.distributions import Sampling, argmax, standardize
from spec_t5x.sampling.draws import Draws
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Bool, Float32, Int, Shaped


def draft_tokens(
    model: Target,
    cache: Cache,
    logits: Float32[Array, "batch vocab"],
    context: Context,
    settings: Sampling,
    gamma: int,
) -> tuple[Proposal, Cache]:
    """``gamma`` tokens, each given those before (Algorithm 1).

    Args:
      model: what drafts.
      cache: holds the rows' texts, their last tokens included.
      logits: the model's, after the last tokens.
      context: the rows.
      settings: how the draft samples.
      gamma: tokens for each row, at least 1.
    """

    def draw(logits, offset, draws, proposal):
        logits = context.ruled(logits[:, None], proposal.tokens, offset)[:, 0]
        token, probs, draws = draw_token(logits, draws, settings)
        return token, draws, _put(proposal, offset, token, probs)

    def draft_one(offset, carry):
        cache, token, draws, proposal = carry
        logits, _, cache = model.score(cache, token[:, None])
        return cache, *draw(logits[:, 0], offset, draws, proposal)

    num = context.num_drafts(gamma)
    first = draw(logits, 0, context.draws, _room(logits, gamma, settings))
    cache, _, _, proposal = lax.fori_loop(1, num, draft_one, (cache, *first))
    # All of them were drawn, in every row: without a limit, a number while tracing.
    return proposal.replace(drawn=num), cache


def draft_tree(
    model: NodeTarget,
    cache: Cache,
    logits: Float32[Array, "batch vocab"],
    context: Context,
    settings: Sampling,
    tree: Tree,
) -> tuple[TreeProposal, Cache]:
    """A token for each node: the children of a node are drawn without replacement.

    One call of the model for each level but the last. The cache keeps its lengths; its
    slots from the root's on hold the nodes.

    Args:
      model: what drafts.
      cache: holds the rows' texts, their last tokens included.
      logits: the model's, after the last tokens.
      context: the rows.
      settings: how the draft samples.
      tree: the shape.
    """
    level_logits, draws = logits[:, None], context.draws
    tokens, all_probs = [], []
    for depth, branching in enumerate(tree.branching):
        level_logits = ruled_nodes(context, level_logits, tree, tokens, tree.level_starts[depth])
        probs = standardize(level_logits, settings)
        children = []
        for i in range(tree.level_sizes[depth]):
            of_node, draws = draws.next_distinct(
                probs[:, i], level_logits[:, i], branching, settings
            )
            children.append(of_node)
        tokens.append(jnp.concatenate(children, axis=1))
        all_probs.append(probs)
        if depth + 1 < tree.depth:
            first = tree.level_starts[depth + 1]
            slots = model.num_slots(cache)
            nodes = tree_nodes(tree, tokens[-1], context.lengths, slots, first)
            level_logits, _, cache = model.score_nodes(cache, nodes)
    return TreeProposal(
        tokens=jnp.concatenate(tokens, axis=1),
        probs=None if settings.greedy else jnp.concatenate(all_probs, axis=1),
        depths=jnp.full(tokens[0].shape[0], tree.depth, jnp.int32),
    ), cache


def draw_token(
    logits: Float32[Array, "batch vocab"], draws: Draws, settings: Sampling
) -> tuple[Int[Array, "batch"], Float32[Array, "batch vocab"] | None, Draws]:
    """The draft's next token, what it was drawn from, and the draws that are left.

    At temperature 0 the token is certain: there is nothing to draw, nor to draw from.
    """
    if settings.greedy:
        return argmax(logits), None, draws
    probs = standardize(logits, settings)
    token, draws = draws.next(probs, settings)
    return token, probs, draws


def catch_up(
    model: Target,
    cache: Cache,
    sequences: Int[Array, "batch width"],
    wanted: Int[Array, "batch"],
    live: Bool[Array, "batch"],
    width: int,
    score: Callable[[Cache, Array], tuple] | None = None,
) -> Cache:
    """The cache with at least ``wanted`` tokens of each live row's text in it.

    Where others propose too, the text may run ahead of a model's cache. What is missing
    is fed ``width`` tokens at a time; mostly nothing is, and no call is made. ``score`` feeds
    them, if not the model's own.
    """
    score = score or model.score

    def feed(cache):
        starts = jnp.minimum(cache.lengths, wanted)
        tokens = slices(sequences, starts, width)
        cache = score(model.rollback(cache, starts), tokens)[-1]
        return model.rollback(cache, jnp.minimum(starts + width, wanted))

    def trails(cache):
        return jnp.any(live & (cache.lengths < wanted))

    return lax.while_loop(trails, feed, cache)


def slices(
    sequences: Shaped[Array, "batch width *rest"], starts: Int[Array, "batch"], num: int
) -> Shaped[Array, "batch num *rest"]:
    """``num`` tokens of each row, from its own start on; or what else is by position."""
    take = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, num))
    return take(sequences, starts)


def _after(model: Target, cache: Cache, token: Int[Array, "batch"]):
    logits, _, cache = model.score(cache, token[:, None])
    return logits[:, 0], cache


def _room(logits: Float32[Array, "batch vocab"], gamma: int, settings: Sampling) -> Proposal:
    """A proposal to be written to."""
    batch, vocab_size = logits.shape
    return Proposal(
        tokens=jnp.zeros((batch, gamma), jnp.int32),
        probs=None if settings.greedy else jnp.zeros((batch, gamma, vocab_size), jnp.float32),
    )


def _put(proposal: Proposal, offset, token: Int[Array, "batch"], probs) -> Proposal:
    """With a token at ``offset``, in place: put together at the end, they would be copied."""

    def put(buffer, values):
        return lax.dynamic_update_index_in_dim(buffer, values, offset, axis=1)

    return proposal.replace(
        tokens=put(proposal.tokens, token),
        probs=None if probs is None else put(proposal.probs, probs),
    )
