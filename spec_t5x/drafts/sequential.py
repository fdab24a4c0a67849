"""Drafting one token after the other with a model: what several drafts share."""

import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.distributions import Sampling, argmax, standardize
from spec_t5x.drafts import stopping as stopping_lib
from spec_t5x.drafts.stopping import History, Stopping
from spec_t5x.interfaces import Cache, Context, Proposal, Target
from spec_t5x.types import Array, Bool, Float32, Int


def draft_tokens(
    model: Target,
    cache: Cache,
    logits: Float32[Array, "batch vocab"],
    context: Context,
    settings: Sampling,
    gamma: int,
) -> tuple[Proposal, Cache]:
    """``gamma`` tokens, each sampled given the ones before it (Algorithm 1).

    Args:
      model: what drafts.
      cache: holds the rows' texts, their last tokens included.
      logits: the model's, after the last tokens.
      context: the rows.
      settings: how the draft samples.
      gamma: tokens for each row, at least 1.
    """

    def draw(logits, offset, proposal):
        probs = standardize(logits, settings)
        token = sample_from(logits, probs, offset, context, settings)
        # In place: put together afterwards, they would be copied once more.
        return token, proposal.replace(
            tokens=_put(proposal.tokens, token, offset), probs=_put(proposal.probs, probs, offset)
        )

    def draft_one(offset, carry):
        cache, token, proposal = carry
        logits, cache = model.score(cache, token[:, None])
        return cache, *draw(logits[:, 0], offset, proposal)

    batch, vocab_size = logits.shape
    nothing = Proposal.nothing(batch, gamma, vocab_size)
    token, proposal = draw(logits, 0, nothing)
    cache, _, proposal = lax.fori_loop(1, gamma, draft_one, (cache, token, proposal))
    return proposal.replace(counts=jnp.full(batch, gamma, jnp.int32)), cache


def draft_while_worth_it(
    model: Target,
    cache: Cache,
    logits: Float32[Array, "batch vocab"],
    context: Context,
    settings: Sampling,
    gamma: int,
    stopping: Stopping,
    history: History,
) -> tuple[Proposal, Cache, History]:
    """Up to ``gamma`` tokens: each row stops when one more is not worth its cost.

    The model runs for as long as any live row drafts. The arguments are those of
    ``draft_tokens``, and what ``stopping.py`` decides with.
    """
    batch, vocab_size = logits.shape
    nothing = Proposal.nothing(batch, gamma, vocab_size)

    def draft_one(carry):
        offset, cache, logits, drafting, reach, proposal, seen = carry
        probs = standardize(logits, settings)
        token = sample_from(logits, probs, offset, context, settings)
        # The model's own probability: at temperature 0 all of ``probs`` are certain.
        confidence = _probability(jax.nn.softmax(logits, axis=-1), token)
        proposal = Proposal(
            tokens=_put(proposal.tokens, token, offset),
            probs=_put(proposal.probs, probs, offset),
            counts=proposal.counts + drafting,
        )
        reach = reach * stopping_lib.acceptance(history, confidence)
        drafting &= stopping_lib.worth_another(history, stopping, reach)
        seen = stopping_lib.observe(seen, confidence, offset)
        logits, cache = lax.cond(
            jnp.any(drafting & context.live) & (offset + 1 < gamma),
            lambda cache: _after(model, cache, token),
            lambda cache: (logits, cache),
            cache,
        )
        return offset + 1, cache, logits, drafting, reach, proposal, seen

    def goes_on(carry):
        offset, drafting = carry[0], carry[3]
        return jnp.any(drafting & context.live) & (offset < gamma)

    start = (
        jnp.int32(0),
        cache,
        logits,
        # The first draft costs little more than knowing whether to make it.
        context.live,
        jnp.ones(batch, jnp.float32),
        nothing,
        history,
    )
    _, cache, _, _, _, proposal, seen = lax.while_loop(goes_on, draft_one, start)
    return proposal, cache, seen.replace(proposed=proposal.counts)


def sample_from(
    logits: Float32[Array, "batch vocab"],
    probs: Float32[Array, "batch vocab"],
    offset,
    context: Context,
    settings: Sampling,
) -> Int[Array, "batch"]:
    """The draft's token at ``offset``; at temperature 0 its noise has no part in it."""
    if settings.greedy:
        # Of the logits: ``standardize`` has looked for it there already.
        return argmax(logits)
    return context.draws.sample(probs, offset, settings)


def catch_up(
    model: Target,
    cache: Cache,
    sequences: Int[Array, "batch width"],
    wanted: Int[Array, "batch"],
    live: Bool[Array, "batch"],
    width: int,
) -> Cache:
    """The cache with at least ``wanted`` tokens of each live row's text in it.

    Where others propose too, the text may run ahead of a model's cache. What is missing
    is fed ``width`` tokens at a time; mostly nothing is, and no call is made.
    """

    def feed(cache):
        starts = jnp.minimum(cache.lengths, wanted)
        tokens = slices(sequences, starts, width)
        _, cache = model.score(model.rollback(cache, starts), tokens)
        return model.rollback(cache, jnp.minimum(starts + width, wanted))

    def trails(cache):
        return jnp.any(live & (cache.lengths < wanted))

    return lax.while_loop(trails, feed, cache)


def slices(
    sequences: Int[Array, "batch width"], starts: Int[Array, "batch"], num: int
) -> Int[Array, "batch num"]:
    """``num`` tokens of each row, from its own start on."""
    return jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), (num,)))(sequences, starts)


def _after(model: Target, cache: Cache, token: Int[Array, "batch"]):
    logits, cache = model.score(cache, token[:, None])
    return logits[:, 0], cache


def _probability(probs, tokens):
    return jnp.take_along_axis(probs, tokens[:, None], axis=-1)[:, 0]


def _put(buffer: Array, values: Array, offset) -> Array:
    """``buffer`` with ``values`` at ``offset`` of its second axis."""
    return lax.dynamic_update_index_in_dim(buffer, values, offset, axis=1)
