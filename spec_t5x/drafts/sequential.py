"""Drafting with a cached model: one token after the other, or a tree level by level."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Cache, Context, NodeTarget, Proposal, Target, TreeProposal
from spec_t5x.loops.tree_nodes import ruled_nodes, tree_nodes
from spec_t5x.sampling.distributions import Sampling, argmax, standardize
from spec_t5x.sampling.draws import Draws
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Float32, Int, PyTree, Shaped


def check_cache(draft: Any, target: Target, kind: type, layers: int) -> None:
    """Raises ``InputError`` unless ``draft.model`` can read that many layers of the cache."""
    name, of, remedy = type(draft).__name__, draft.model.config, "make it from this target"
    if not isinstance(target, kind):
        given = f"is of a {kind.__name__} and the target a {type(target).__name__}"
        raise InputError(f"{name} {given}: {remedy}")
    names = ("num_kv_heads", "head_dim", "dtype") if getattr(of, "reads_source", True) else ()
    sizes = {size: getattr(of, size) for size in names}
    # An EAGLE head reads the target's states, too.
    sizes["emb_dim"] = getattr(of, "target_dim", target.config.emb_dim)
    # The target may have more layers.
    sizes["num_decoder_layers"] = max(layers, target.num_layers)
    for size, value in sizes.items():
        if (found := getattr(target.config, size)) != value:
            raise InputError(f"{name} needs {size} {value} and the target has {found}: {remedy}")


def draft_tokens(
    score: Callable[[PyTree, Array], tuple],
    cache: PyTree,
    logits: Float32[Array, "batch vocab"],
    context: Context,
    settings: Sampling | None,
    gamma: int,
) -> tuple[Proposal, PyTree]:
    """Drafts ``gamma`` tokens, at most ``context.limit``, each given the earlier (Algorithm 1).

    ``logits`` are the draft's after the last tokens of the texts in ``cache``, and ``score`` is a
    ``Target``'s, or a function like it. If ``settings`` are None, the target's are used. The
    returned cache also has the drafted tokens, but for the last one.
    """
    settings = settings or context.settings

    def draw(logits, offset, draws, drafted):
        logits = context.ruled(logits[:, None], drafted[0], offset)[:, 0]
        token, probs, draws = draw_token(logits, draws, settings)
        return token, draws, jax.tree.map(functools.partial(_put, offset), drafted, (token, probs))

    def draft_one(offset, carry):
        cache, token, draws, drafted = carry
        logits, _, cache = score(cache, token[:, None])
        return cache, *draw(logits[:, 0], offset, draws, drafted)

    num, (batch, vocab_size) = context.num_drafts(gamma), logits.shape
    tokens = jnp.zeros((batch, gamma), jnp.int32)
    probs = None if settings.greedy else jnp.zeros((batch, gamma, vocab_size), jnp.float32)
    first = draw(logits, 0, context.draws, (tokens, probs))
    cache, _, _, drafted = lax.fori_loop(1, num, draft_one, (cache, *first))
    return Proposal(*drafted, drawn=num), cache


def _put(offset: Int[Array, ""] | int, drafted: Array, new: Array) -> Array:
    """Returns ``drafted`` with ``new`` at ``offset`` of its second axis."""
    # Writes in place, because stacking arrays at the end would copy them. XLA for GPUs would make
    # one row's write a copy outside the CUDA graph, which would end before and begin after it.
    write = functools.partial(lax.dynamic_update_slice_in_dim, start_index=offset, axis=1)
    elsewhere = lax.broadcasted_iota(jnp.int32, drafted.shape, 1) != offset
    on_gpu = functools.partial(jnp.where, elsewhere) if drafted.shape[0] == 1 else write
    return lax.platform_dependent(drafted, new[:, None], cuda=on_gpu, default=write)


def draft_tree(
    model: NodeTarget,
    cache: Cache,
    logits: Float32[Array, "batch vocab"],
    context: Context,
    settings: Sampling | None,
    tree: Tree,
) -> tuple[TreeProposal, Cache]:
    """Drafts a token for each node but the root; siblings are drawn without replacement.

    The model is called once for each level but the root's and the last. The returned cache keeps
    its lengths; the slots after the root's hold the nodes. Arguments are as in ``draft_tokens``.
    """
    settings = settings or context.settings
    level_logits, draws = logits[:, None], context.draws
    tokens, all_probs = [], []
    for depth, branching in enumerate(tree.branching):
        level_logits = ruled_nodes(context, level_logits, tree, tokens, tree.level_starts[depth])
        probs = standardize(level_logits, settings)
        children, draws = draws.next_distinct(probs, level_logits, branching, settings)
        tokens.append(children.reshape(children.shape[0], -1))
        all_probs.append(probs)
        if depth + 1 < tree.depth:
            first = tree.level_starts[depth + 1]
            nodes = tree_nodes(tree, tokens[-1], context.lengths, model.num_slots(cache), first)
            level_logits, _, cache = model.score_nodes(cache, nodes)
    return TreeProposal(
        tokens=jnp.concatenate(tokens, axis=1),
        probs=None if settings.greedy else jnp.concatenate(all_probs, axis=1),
        depths=jnp.full(tokens[0].shape[0], tree.depth, jnp.int32),
    ), cache


def draw_token(
    logits: Float32[Array, "batch vocab"], draws: Draws, settings: Sampling
) -> tuple[Int[Array, "batch"], Float32[Array, "batch vocab"] | None, Draws]:
    """Draws each row's token; returns it, its distribution (None if greedy) and the draws left."""
    if settings.greedy:
        return argmax(logits), None, draws
    probs = standardize(logits, settings)
    token, draws = draws.next(probs, settings)
    return token, probs, draws


def catch_up(
    model: Target,
    cache: Cache,
    context: Context,
    wanted: Int[Array, "batch"],
    width: int,
    score: Callable[[Cache, Array], tuple] | None = None,
) -> Cache:
    """Returns the cache with at least ``wanted`` tokens of each live row's text in it.

    Plain steps and other drafts extend the text without this cache. The missing tokens are fed
    ``width`` at a time, by ``score`` or ``model.score``; if none is missing, no call is made.
    """
    score = score or model.score

    def feed(cache):
        starts = jnp.minimum(cache.lengths, wanted)
        tokens = slices(context.sequences, starts, width)
        cache = score(model.rollback(cache, starts), tokens)[-1]
        return model.rollback(cache, jnp.minimum(starts + width, wanted))

    def lacks_some(cache):
        return jnp.any(context.live & (cache.lengths < wanted))

    return lax.while_loop(lacks_some, feed, cache)


def slices(
    sequences: Shaped[Array, "batch width *rest"], starts: Int[Array, "batch"], num: int
) -> Shaped[Array, "batch num *rest"]:
    """Returns ``sequences[b, starts[b] : starts[b] + num]`` for each row b."""
    return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, num))(sequences, starts)
