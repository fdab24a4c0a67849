"""Kernels of attention: to the text, whose cache they also write, and to the source."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from spec_t5x.contrib.gpu.kernels import TILE, Kernel, dot
from spec_t5x.interfaces import Nodes
from spec_t5x.models.attention import MASKED
from spec_t5x.types import Array, Float, Float32, Int, Shaped

# Elements of keys that a round reads (of 64 in a head: 128 keys), warps of a program, and most
# programs of a head and token that attend to a source one by one.
_BLOCK_ELEMENTS, _WARPS, _MOST_PARTS = 8 << 10, 8, 4
# Stages of the loops in tiles over text and source: buffers of rounds, and the round computed.
_TEXT_STAGES, _SOURCE_STAGES = 2, 3


class Contexts(NamedTuple):
    """Contexts of parts of an attention's keys: averages by the softmax of each part's scores."""

    averages: Float32[Array, "*tokens parts joined"]
    # Logarithms of the sums of the scores' exponentials, the same for all features of a head.
    logs: Float32[Array, "*tokens parts joined"]

    def of_all_keys(self, tokens: tuple, features: Any) -> Float32[Array, "*tokens features"]:
        """Returns some features of some tokens' contexts; also reads references in a kernel."""
        parts = range(self.logs.shape[-2])
        averages, logs = ([each[*tokens, part, features] for part in parts] for each in self)
        largest = functools.reduce(jnp.maximum, logs)
        weights = [jnp.exp(each - largest) for each in logs]
        weighted = (weight * each for weight, each in zip(weights, averages, strict=True))
        return sum(weighted) / sum(weights)


def attend_to_text(
    new: Sequence[Float[Array, "batch new joined"]],
    keys: Float[Array, "batch heads length head_dim"],
    values: Float[Array, "batch heads length head_dim"],
    places: Int[Array, "batch"] | Nodes,
    by_distance: Float[Array, "heads length"] | None,
    *,
    in_tiles: bool = False,
) -> tuple[
    Float[Array, "batch new joined"],
    Float[Array, "batch heads length head_dim"],
    Float[Array, "batch heads length head_dim"],
]:
    """Writes new tokens' keys and values to a cache, and attends to the tokens before each.

    Row b's new tokens, in tiles at most ``TILE``, are in consecutive slots from ``places[b]`` on,
    or in those of nodes. ``new`` are their queries, keys and values; ``by_distance`` is the bias of
    keys so many positions before their query. ``in_tiles`` as in ``multiply``.

    Returns:
      The contexts, and the cache's keys and values, which are written in place.
    """
    if isinstance(places, Nodes):
        places = places.slots, places.positions, places.slot_positions, places.visible
    shapes = (jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (new[0], keys, values))
    kernel = Kernel(
        _attend_to_text,
        (in_tiles,),
        grid=(*keys.shape[:2], 1 if in_tiles else new[0].shape[1]),
        results=tuple(shapes),
        aliases=((0, 1), (1, 2)),
        warps=_WARPS,
        stages=_TEXT_STAGES if in_tiles else 1,
    )
    return tuple(kernel(keys, values, list(new), places, by_distance))


def _attend_to_text(in_tiles, keys, values, new, places, table, contexts, kept_keys, kept_values):
    row, head = pl.program_id(0), pl.program_id(1)
    (_, _, length, head_dim), num_new = keys.shape, contexts.shape[1]
    token = _tokens(in_tiles, num_new)
    own, block = pl.ds(head * head_dim, head_dim), _BLOCK_ELEMENTS // head_dim
    queries, new_keys, new_values = new
    in_slots = isinstance(places, tuple)
    if in_slots:
        new_slots, positions, slot_positions, visible = places
        slot_of, position, end = lambda i: new_slots[row, i], positions[row, token], length
    else:
        first = places[row]
        # As in `lax.dynamic_update_slice`, tokens that do not fit are moved back.
        kept = jnp.clip(first, 0, length - num_new)
        slot_of, position, end = lambda i: kept + i, first + token, kept + num_new

    def read(slots):
        # New entries are not read from the cache: they may not have been written yet.
        entries = []
        for cached, fresh in ((keys, new_keys), (values, new_values)):
            found = cached[row, head, slots, :]
            for i in range(num_new):
                is_new = (slots == slot_of(i))[:, None]
                found = jnp.where(is_new, fresh[row, i, own][None, :], found)
            entries.append((found, 1.0))
        return entries

    def bias(slots):
        distances = _over(position) - (slot_positions[row, slots] if in_slots else slots)
        seen = distances >= 0
        if in_slots:
            seen = visible[row, *jnp.broadcast_arrays(_over(token), slots)]
        if table is None:
            return jnp.where(seen, 0.0, MASKED)
        of_pairs = table[head, jnp.clip(distances, 0, length - 1)].astype(jnp.float32)
        return jnp.where(seen, of_pairs, MASKED)

    rounds = (end + block - 1) // block
    context, _ = _context(queries[row, token, own], (0, end), (block, rounds), read, bias)
    contexts[row, token, own] = context.astype(contexts.dtype)
    kept_keys[row, head, slot_of(token), :] = new_keys[row, token, own]
    kept_values[row, head, slot_of(token), :] = new_values[row, token, own]


def attend_to_source(
    queries: Float[Array, "batch new joined"],
    keys: Shaped[Array, "inputs heads source head_dim"],
    values: Shaped[Array, "inputs heads source head_dim"],
    bias: Float32[Array, "inputs source"],
    scales: Sequence[Float[Array, "inputs heads 1 source"]] = (),
    *,
    in_tiles: bool = False,
) -> Contexts | Float[Array, "batch new joined"]:
    """Attends from new tokens of each row, in tiles at most ``TILE``, to the keys of its input.

    ``bias`` is added to the scores. int8 keys and values have the two ``scales``. The number of
    parts depends on the source's length alone. ``in_tiles`` as in ``multiply``: there are no parts.
    """
    (batch, num, joined), (heads, length, head_dim) = queries.shape, keys.shape[1:]
    block = min(_BLOCK_ELEMENTS // head_dim, 1 << (length - 1).bit_length())
    if in_tiles:
        block = max(block, TILE)
    blocks = -(-length // block)
    rounds = blocks if in_tiles else -(-blocks // _MOST_PARTS)
    parts = -(-blocks // rounds)
    part = jax.ShapeDtypeStruct((batch, num, parts, joined), jnp.float32)
    whole = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    kernel = Kernel(
        _attend_to_source,
        (in_tiles, block, rounds),
        grid=(batch, heads, 1 if in_tiles else num, parts),
        results=(whole,) if in_tiles else (part, part),
        warps=_WARPS,
        stages=_SOURCE_STAGES if in_tiles else 1,
    )
    contexts = kernel(queries, keys, values, bias, list(scales))
    return contexts[0] if in_tiles else Contexts(*contexts)


def _attend_to_source(
    in_tiles, block, rounds, queries, keys, values, source_bias, scales, averages, logs=None
) -> None:
    row, head, part = (pl.program_id(axis) for axis in (0, 1, 3))
    token = _tokens(in_tiles, queries.shape[1])
    given = row // (queries.shape[0] // keys.shape[0])
    length, head_dim = keys.shape[2:]
    own, first = pl.ds(head * head_dim, head_dim), part * block * rounds

    def read(slots):
        factors = [each[given, head, 0, slots] for each in scales] or [1.0, 1.0]
        entries = (cached[given, head, slots, :] for cached in (keys, values))
        return zip(entries, factors, strict=True)

    query, bounds = queries[row, token, own], (first, length)
    context, log = _context(
        query, bounds, (block, rounds), read, lambda slots: source_bias[given, slots]
    )
    if logs is None:
        averages[row, token, own] = context.astype(averages.dtype)
    else:
        averages[row, token, part, own] = context
        logs[row, token, part, own] = jnp.full(head_dim, log)


def _tokens(in_tiles: bool, num: int) -> Int[Array, ""] | Int[Array, "tile"]:
    """Returns a program's token, or those of its tile; missing ones repeat the last."""
    if in_tiles:
        return jnp.minimum(jnp.arange(TILE), num - 1)
    return pl.program_id(2)


def _over(each: Array) -> Array:
    """Returns one value, or those of a tile's tokens as a column."""
    return each[:, None] if each.ndim else each


def _context(
    query: Float[Array, "head_dim"] | Float[Array, "tile head_dim"],
    bounds: tuple[Int[Array, ""] | int, Int[Array, ""] | int],
    blocks: tuple[int, Int[Array, ""] | int],
    read: Callable[[Array], Iterable[tuple[Array, Array | float]]],
    bias: Callable[[Array], Array],
) -> tuple[Float32[Array, "*tile head_dim"], Float32[Array, "*tile"]]:
    """Averages values of slots between two ``bounds`` by a softmax in one pass.

    Args:
      query: of one token and head, or of a tile's tokens.
      bounds: the first slot, and the first one that is not read.
      blocks: slots of a round, and rounds.
      read: gets slots ``[keys]``; returns keys and values ``[keys, head_dim]``, each with factors
        ``[keys]``.
      bias: gets slots ``[keys]``, of a tile ``[1, keys]``, and returns what is added to scores.

    Returns:
      The average, and the logarithm of the sum of the scores' exponentials. The pass keeps the
      largest score so far, by which earlier sums are rescaled (Milakov and Gimelshein 2018, arXiv
      1805.02867, algorithm 3).
    """
    (first, end), (block, rounds) = bounds, blocks
    in_tiles = query.ndim == 2
    if not in_tiles:
        query = query.astype(jnp.float32)

    def for_all(each):
        return each[None, :] if in_tiles and jnp.ndim(each) else each

    def scores_of(keys):
        if in_tiles:
            return dot(query, keys.astype(query.dtype), 1)
        return jnp.sum(keys.astype(jnp.float32) * query[None, :], axis=1)

    def sum_of(weights, values):
        if in_tiles:
            return dot(weights.astype(query.dtype), values.astype(query.dtype), 0)
        return jnp.sum(weights[:, None] * values.astype(jnp.float32), axis=0)

    def attend(index, earlier):
        before, total, sums = earlier
        slots = first + index * block + jnp.arange(block)
        inside = slots < end
        slots = jnp.minimum(slots, end - 1)
        (keys, key_factors), (values, value_factors) = read(slots)
        added = bias(for_all(slots))
        scores = scores_of(keys) * for_all(key_factors) + added
        scores = jnp.where(for_all(inside), scores, -jnp.inf)
        largest = jnp.maximum(before, jnp.max(scores, axis=-1))
        shrink, weights = jnp.exp(before - largest), jnp.exp(scores - _over(largest))
        return (
            largest,
            total * shrink + jnp.sum(weights, axis=-1),
            sums * _over(shrink) + sum_of(weights * for_all(value_factors), values),
        )

    zero, sums = jnp.zeros(query.shape[:-1], jnp.float32), jnp.zeros(query.shape, jnp.float32)
    if in_tiles:
        # All rounds are in the loop, whose reads are ahead; every round has a slot inside.
        before = zero + jnp.finfo(jnp.float32).min, zero, sums
        largest, total, sums = lax.fori_loop(0, rounds, attend, before)
    else:
        first_round = attend(0, (zero - jnp.inf, zero, sums))
        largest, total, sums = lax.fori_loop(1, rounds, attend, first_round)
    return sums / _over(total), largest + jnp.log(total)
