"""Speculative decoding with trees: several drafts for one position, one target call.

The loop is that of ``speculative.py``, but the draft proposes a static tree. ONE target call
scores all nodes, each of which attends to the row's text and to the path from the root to itself.
The verifier walks down from the root: at each node it tests the children one after the other
(``Verifier.verify_node``; at temperature 0, whether a child is the argmax) and moves to the first
accepted child; if none is accepted, the verifier draws the next token itself. Cache entries of
the path's nodes move to the end of the text, and the others are rolled back.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x import interfaces
from spec_t5x.interfaces import Context, DraftState, NodeTarget, Proposal, TreeDraft, TreeProposal
from spec_t5x.loops.decode_state import Verified
from spec_t5x.loops.tree_nodes import ruled_nodes, tree_nodes
from spec_t5x.sampling.distributions import Sampling, argmax, sample, standardize
from spec_t5x.sampling.draws import RowStream, purpose_keys
from spec_t5x.sampling.random_bits import uniform
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.sampling.verification import Verdict
from spec_t5x.types import Array, Float, Float32, Int, Key
from spec_t5x.verifiers import Verifier


def verify(
    target: NodeTarget,
    draft: TreeDraft,
    draft_state: DraftState,
    context: Context,
    stream: RowStream,
    tree: Tree,
    verifier: Verifier,
) -> Verified:
    """Proposes, scores and verifies one tree of tokens for each row."""
    lengths, settings, cache = context.lengths, context.settings, context.target_cache
    proposal, draft_state = interfaces.proposed(draft, draft_state, context, tree)
    # ONE target call over the row's last token and all nodes.
    tokens = jnp.concatenate([context.last_tokens[:, None], proposal.tokens], axis=1)
    nodes = tree_nodes(tree, tokens, lengths, target.num_slots(cache))
    logits, states, cache = interfaces.shown_to(draft, target).score_nodes(cache, nodes)
    logits = ruled_nodes(context, logits, tree, [proposal.tokens])
    probs = standardize(logits, settings)
    verdict = verify_tree(stream, lengths, proposal, logits, probs, settings, tree, verifier)

    path = verdict.path
    logits, probs, states = (_along(values, path) for values in (logits, probs, states))
    # The first child of each node of the path but the last node.
    inner = jnp.minimum(path[:, :-1], tree.num_inner - 1)
    firsts = jnp.asarray(tree.first_children)[inner]
    firsts = jnp.take_along_axis(proposal.tokens, firsts - 1, axis=1)
    accepted = jnp.take_along_axis(proposal.tokens, jnp.maximum(path[:, 1:] - 1, 0), axis=1)
    is_accepted = jnp.arange(tree.depth)[None, :] < verdict.num_accepted[:, None]
    # Beta is computed as for a chain of these first children.
    of_firsts = None if proposal.probs is None else _along(proposal.probs, inner)
    num_drafts = jnp.minimum(verdict.num_accepted + 1, proposal.depths)
    return Verified(
        drafts=jnp.where(is_accepted, accepted, firsts),
        num_drafts=jnp.where(context.live, num_drafts, 0),
        num_proposed=(tree.num_nodes - 1) * (proposal.depths > 0),
        verdict=verdict,
        logits=logits,
        probs=probs,
        states=states,
        beta=verifier.chances(Proposal(firsts, of_firsts), logits, probs, settings, verdict),
        target_cache=target.move(cache, lengths[:, None] + path[:, 1:], lengths + 1),
        draft_state=draft_state,
    )


def verify_tree(
    stream: RowStream,
    lengths: Int[Array, "batch"],
    proposal: TreeProposal,
    logits: Float32[Array, "batch nodes vocab"],
    probs: Float32[Array, "batch nodes vocab"],
    settings: Sampling,
    tree: Tree,
    verifier: Verifier,
) -> Verdict:
    """Returns each row's verdict, from the target's ``logits`` and ``probs`` after each node."""
    if settings.greedy:
        walk = functools.partial(walk_argmax, tree)
        return jax.vmap(walk)(proposal.tokens, argmax(logits), proposal.depths)
    emit_keys, accept_keys, _ = purpose_keys(stream, lengths)
    draft_probs = proposal.probs
    if draft_probs is None:
        firsts = proposal.tokens[:, tree.first_children - 1]
        draft_probs = jax.nn.one_hot(firsts, probs.shape[-1], dtype=jnp.float32)
    proposed = tree.depths[None, : tree.num_inner] < proposal.depths[:, None]
    draft_probs = jnp.where(proposed[..., None], draft_probs, 0.0)
    walk = functools.partial(walk_sampled, tree, verifier.verify_node)
    return jax.vmap(walk)(accept_keys, emit_keys, proposal.tokens, draft_probs, probs)


def walk_sampled(
    tree: Tree,
    verify_node: Callable,
    key: Key[Array, ""],
    emit_key: Key[Array, ""],
    draft_tokens: Int[Array, "drafts"],
    draft_probs: Float[Array, "inner vocab"],
    target_probs: Float[Array, "nodes vocab"],
) -> Verdict:
    """Walks down one row's tree with ``verify_node`` (``Verifier.verify_node``)."""
    uniforms = jnp.split(uniform(key, sum(tree.branching)), np.cumsum(tree.branching)[:-1])
    first_children = jnp.asarray(tree.first_children)
    node, going = jnp.int32(0), jnp.asarray(True)
    accepted, path, emission = jnp.int32(0), [node], target_probs[0]
    for of_children in uniforms:
        # A row that has stopped computes a verdict on its last node again, and ignores it.
        children = first_children[node] + jnp.arange(of_children.shape[0])
        given = of_children, draft_tokens[children - 1], draft_probs[node], target_probs[node]
        chosen, otherwise = verify_node(*given)
        moves = going & (chosen < children.shape[0])
        emission = jnp.where(going & ~moves, otherwise, emission)
        node = jnp.where(moves, children[jnp.minimum(chosen, children.shape[0] - 1)], node)
        node = node.astype(jnp.int32)
        accepted += moves
        path.append(node)
        going = moves
    emission = jnp.where(going, target_probs[node], emission)
    return Verdict(accepted, sample(emit_key, emission), jnp.stack(path))


def walk_argmax(
    tree: Tree,
    draft_tokens: Int[Array, "drafts"],
    target_tokens: Int[Array, "nodes"],
    num_levels: Int[Array, ""],
) -> Verdict:
    """Walks down ``num_levels`` of a row's tree, to the child that is the argmax at its parent."""
    depths = jnp.asarray(tree.depths, jnp.int32)
    matches = draft_tokens == target_tokens[tree.parents[1:]]
    matches = jnp.append(True, matches & (depths[1:] <= num_levels))
    # A node is reached if all nodes on the path to it match; siblings are distinct tokens.
    reached = jnp.all(matches[None, :] | ~tree.ancestors, axis=1)
    node = jnp.argmax(jnp.where(reached, depths, -1))
    return Verdict(depths[node], target_tokens[node], jnp.asarray(tree.paths)[node])


def _along(values: Array, indices: Int[Array, "batch levels"]) -> Array:
    return jnp.take_along_axis(values, indices[:, :, None], axis=1)
