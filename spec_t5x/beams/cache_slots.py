"""Layout of a beam search's tokens in a cache of slots (``interfaces.Nodes``).

Every position of the text has ``width`` slots side by side, its *places*, one for each token that
hypotheses, or nodes of a tree, have there: place i of position p is slot ``p * width + i``. The
places of a hypothesis's tokens, by position, are its *lineage*:

    position      0   1   2   3           "0 0 1 0" and "0 0 1 1" share all tokens but
    place 0       *   *   .   *           the last one: these are at the two places of
    place 1       .   .   *   *           position 3, and both see place 1 of position 2

Hypotheses that branch from one share its places, so no keys or values are copied, while a beam
search usually reorders its whole cache in every step. No slot is ever freed: a search has at most
``width`` tokens at a position, and overwrites dropped ones when it reaches the position again.
"""

import jax.numpy as jnp

from spec_t5x.interfaces import Cache, Nodes, Target
from spec_t5x.types import Array, Int, PyTree


def nodes(
    tokens: Int[Array, "batch nodes"],
    positions: Int[Array, "batch nodes"],
    lineages: Int[Array, "batch nodes positions"],
    width: int,
) -> Nodes:
    """Returns the argument of ``score_nodes`` for tokens at given positions.

    ``lineages[b, n, p]``, below ``width``, is the place of node n's text at position p, up to the
    node itself; later entries are ignored. No two tokens of a row share position and place.
    """
    batch, num, length = lineages.shape
    places = jnp.take_along_axis(lineages, positions[:, :, None], axis=2)[:, :, 0]
    position_of = jnp.arange(length * width) // width
    is_earlier = jnp.arange(length)[None, None, :] <= positions[:, :, None]
    is_own = lineages[..., None] == jnp.arange(width)[None, None, None, :]
    return Nodes(
        tokens=tokens,
        positions=positions,
        slots=positions * width + places,
        slot_positions=jnp.tile(position_of[None], (batch, 1)),
        visible=(is_own & is_earlier[..., None]).reshape(batch, num, length * width),
    )


def settle(
    lineages: Int[Array, "batch nodes positions"],
    positions: Int[Array, "batch"],
    places: Int[Array, "nodes"],
) -> Int[Array, "batch nodes positions"]:
    """Returns the lineages with node n at place ``places[n]`` of row b's ``positions[b]``."""
    is_here = jnp.arange(lineages.shape[2])[None, :] == positions[:, None]
    return jnp.where(is_here[:, None, :], places[None, :, None], lineages)


def prefill(
    target: Target, inputs: PyTree, prompts: Int[Array, "batch prompt"], room: int, width: int
) -> Cache:
    """Returns a cache of ``room`` positions with ``width`` places each; prompts are at place 0.

    The search feeds each row's last token, and in time overwrites the padding of shorter
    prompts, which is fed here.
    """
    cache = target.prefill(inputs, room * width)
    batch, num = prompts.shape[0], prompts.shape[1] - 1
    if num:
        all_first = jnp.zeros((batch, num, room), jnp.int32)
        positions = jnp.tile(jnp.arange(num)[None], (batch, 1))
        fed = nodes(prompts[:, :-1], positions, all_first, width)
        *_, cache = target.score_nodes(cache, fed)
    return cache
