"""Kernels in Pallas (Triton) for decoder steps: products with norms, attention over caches.

A step's kernels are short: each takes a few times a read of memory. So a program requests all that
it reads at once, and multiplies tokens one by one without tensor cores, in one warp, which waits
for no other. A token's result is the same, bit for bit, for any number of tokens and rows, because
the same additions compute it.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spec_t5x.contrib.gpu.transposed import Transposed
from spec_t5x.interfaces import Nodes
from spec_t5x.models.attention import MASKED
from spec_t5x.models.layers import activated
from spec_t5x.types import Array, Float, Float32, Int, Shaped

# Most rows of a batch, and most new tokens of each. The batch decides, and not its tokens, so that
# calls over one and over several tokens are computed alike.
MOST_ROWS, MOST_TOKENS = 8, 16
# Most tokens of a program, of all rows.
_TOKENS = 2
# Elements of matrices in a program's registers, and the most if there would be more programs.
_ELEMENTS, _MOST_ELEMENTS, _PROGRAMS = 1 << 10, 8 << 10, 4 << 10
# Elements of a row that are one array: eight for each thread.
_STEP = 256
# Most rows of a matrix, those of T5 up to large: for XXL, XLA was faster, and XL was not compared.
MOST_INNER = 3072
# Elements of keys that a round of an attention reads (of 64 in a head: 128 keys), its warps, and
# most programs of a head and token that attend to a source.
_BLOCK_ELEMENTS, _ATTENTION_WARPS, _MOST_PARTS = 8 << 10, 8, 4


class Norm(NamedTuple):
    """RMS norm that is applied to the rows of a product."""

    scale: Float[Array, "inner"]
    epsilon: float


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


def fits(*matrices: Transposed) -> bool:
    """Returns True if a program can hold columns of the matrices; sides are multiples of 16."""
    sides = (size for matrix in matrices for size in matrix.shape)
    held = sum(matrix.shape[0] for matrix in matrices)
    return held <= _MOST_ELEMENTS and all(size % 16 == 0 for size in sides)


def multiply(
    states: Float[Array, "rows inner"] | Contexts,
    matrices: Sequence[Transposed],
    norm: Norm | None = None,
    *,
    activations: Sequence[str] = (),
    residual: Float[Array, "rows features"] | None = None,
    dtype: str | None = None,
) -> list[Float[Array, "rows features"]]:
    """Computes ``norm(states) @ matrix`` for matrices of one shape, in one kernel.

    Args:
      states: a row for each token, or the tokens' contexts.
      matrices: matrices that ``fits`` accepts: all together if there are activations, else each.
      norm: norm of the states; None for none.
      activations: if not empty, the one result is the product of the branches, each activated.
      residual: added to the one result.
      dtype: type of the results; None for that of ``states``.
    """
    inner, features = matrices[0].shape
    given = jax.tree.leaves(states)[0]
    shape = jax.ShapeDtypeStruct((given.shape[0], features), dtype or given.dtype)
    pairs = [(matrix.values, matrix.scales) for matrix in matrices]
    groups = [pairs] if activations else [[pair] for pair in pairs]
    columns = _num_columns(features, inner * len(groups[0]))
    call = pl.pallas_call(
        functools.partial(_multiply, columns, norm and norm.epsilon, tuple(activations)),
        # Programs of the same columns follow each other, and find them in the processors' cache.
        grid=(-(-given.shape[0] // _TOKENS), features // columns, len(groups)),
        out_shape=[shape] * len(groups),
        name="multiply",
        **_options(1),
    )
    scale = None if norm is None else norm.scale[None]
    return list(call(states, groups, scale, residual))


def _multiply(
    columns, epsilon, activations, states, groups, norm_scale, residual, *outputs
) -> None:
    first_row, matrix_index = pl.program_id(0) * _TOKENS, pl.program_id(2)
    own = pl.ds(pl.program_id(1) * columns, columns)
    num_rows, inner = outputs[0].shape[0], groups[0][0][0].shape[1]
    step = min(inner & -inner, _STEP)
    parts = [pl.ds(start, step) for start in range(0, inner, step)]
    # Missing rows repeat the last one.
    rows = [jnp.minimum(first_row + i, num_rows - 1) for i in range(min(_TOKENS, num_rows))]

    def read_row(row) -> list[Float[Array, "1 step"]]:
        if isinstance(states, Contexts):
            return [states.of_all_keys((pl.ds(row, 1),), part) for part in parts]
        return [states[pl.ds(row, 1), part] for part in parts]

    def normed(row: list[Array], scales: list[Array]) -> list[Float32[Array, "1 step"]]:
        wide = [part.astype(jnp.float32) for part in row]
        if not scales:
            return wide
        mean = sum(jnp.sum(part * part, axis=1, keepdims=True) for part in wide) / inner
        inverse = lax.rsqrt(mean + epsilon)
        return [part * inverse * scale for part, scale in zip(wide, scales, strict=True)]

    def product(row: list[Array], matrix: list[Array], scales: Array | None) -> Array:
        pairs = zip(row, matrix, strict=True)
        total = jnp.sum(sum(part * each.astype(jnp.float32) for part, each in pairs), axis=1)
        return total if scales is None else total * scales

    def compute(group, output) -> None:
        # All reads are before the first sum, so that they wait for memory together.
        scales = [] if norm_scale is None else [norm_scale[:, part] for part in parts]
        matrices = [
            ([values[own, part] for part in parts], None if scales is None else scales[0, own])
            for values, scales in group
        ]
        added = [0.0 if residual is None else residual[row, own] for row in rows]
        given = [read_row(row) for row in rows]
        scales = [part.astype(jnp.float32) for part in scales]
        found = []
        for row, start in zip(given, added, strict=True):
            row = normed(row, scales)
            results = [product(row, *each) for each in matrices]
            result = activated(activations, results) if activations else results[0]
            found.append((result + start).astype(output.dtype))
        for row, result in zip(rows, found, strict=True):
            output[row, own] = result

    for i, (group, output) in enumerate(zip(groups, outputs, strict=True)):
        # Programs of one matrix each: more processors read than if each read all matrices.
        if len(groups) == 1:
            compute(group, output)
        else:
            pl.when(matrix_index == i)(functools.partial(compute, group, output))


def attend_to_text(
    new: Sequence[Float[Array, "batch new joined"]],
    keys: Float[Array, "batch heads length head_dim"],
    values: Float[Array, "batch heads length head_dim"],
    places: Int[Array, "batch"] | Nodes,
    by_distance: Float[Array, "heads length"] | None,
) -> tuple[
    Float[Array, "batch new joined"],
    Float[Array, "batch heads length head_dim"],
    Float[Array, "batch heads length head_dim"],
]:
    """Writes new tokens' keys and values to a cache, and attends to the tokens before each.

    Row b's new tokens, at most ``MOST_TOKENS``, are in consecutive slots from ``places[b]`` on, or
    in those of nodes. ``new`` are their queries, keys and values; ``by_distance`` is the bias of
    keys so many positions before their query.

    Returns:
      The contexts, and the cache's keys and values, which are written in place.
    """
    if isinstance(places, Nodes):
        places = places.slots, places.positions, places.slot_positions, places.visible
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (new[0], keys, values)]
    return pl.pallas_call(
        _attend_to_text,
        grid=(*keys.shape[:2], new[0].shape[1]),
        out_shape=shapes,
        input_output_aliases={0: 1, 1: 2},
        name="attend_to_text",
        **_options(_ATTENTION_WARPS),
    )(keys, values, list(new), places, by_distance)


def _attend_to_text(keys, values, new, places, table, contexts, kept_keys, kept_values):
    row, head, token = (pl.program_id(axis) for axis in range(3))
    (_, _, length, head_dim), num_new = keys.shape, contexts.shape[1]
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
        distances = position - (slot_positions[row, slots] if in_slots else slots)
        seen = visible[row, token, slots] if in_slots else distances >= 0
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
) -> Contexts:
    """Attends from at most ``MOST_TOKENS`` tokens of each row to the keys and values of its input.

    ``bias`` is added to the scores. int8 keys and values have the two ``scales``. The number of
    parts depends on the source's length alone.
    """
    (batch, num, joined), (heads, length, head_dim) = queries.shape, keys.shape[1:]
    block = min(_BLOCK_ELEMENTS // head_dim, 1 << (length - 1).bit_length())
    blocks = -(-length // block)
    rounds = -(-blocks // _MOST_PARTS)
    parts = -(-blocks // rounds)
    shape = jax.ShapeDtypeStruct((batch, num, parts, joined), jnp.float32)
    call = pl.pallas_call(
        functools.partial(_attend_to_source, block, rounds),
        grid=(batch, heads, num, parts),
        out_shape=[shape, shape],
        name="attend_to_source",
        **_options(_ATTENTION_WARPS),
    )
    return Contexts(*call(queries, keys, values, bias, list(scales)))


def _attend_to_source(
    block, rounds, queries, keys, values, source_bias, scales, averages, logs
) -> None:
    row, head, token, part = (pl.program_id(axis) for axis in range(4))
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
    averages[row, token, part, own] = context
    logs[row, token, part, own] = jnp.full(head_dim, log)


def _context(
    query: Float[Array, "head_dim"],
    bounds: tuple[Int[Array, ""] | int, Int[Array, ""] | int],
    blocks: tuple[int, Int[Array, ""] | int],
    read: Callable[[Array], Iterable[tuple[Array, Array | float]]],
    bias: Callable[[Array], Array],
) -> tuple[Float32[Array, "head_dim"], Float32[Array, ""]]:
    """Averages values of slots between two ``bounds`` by a softmax in one pass.

    Args:
      query: of one token and head.
      bounds: the first slot, and the first one that is not read.
      blocks: slots of a round, and rounds.
      read: gets slots ``[keys]``; returns keys and values ``[keys, head_dim]``, each with factors
        ``[keys]``.
      bias: gets slots ``[keys]``, and returns what is added to their scores.

    Returns:
      The average, and the logarithm of the sum of the scores' exponentials. The pass keeps the
      largest score so far, by which earlier sums are rescaled (Milakov and Gimelshein 2018, arXiv
      1805.02867, algorithm 3).
    """
    (first, end), (block, rounds) = bounds, blocks
    query = query.astype(jnp.float32)

    def attend(index, earlier):
        before, total, sums = earlier
        slots = first + index * block + jnp.arange(block)
        inside = slots < end
        slots = jnp.minimum(slots, end - 1)
        (keys, key_factors), (values, value_factors) = read(slots)
        added = bias(slots)
        scores = jnp.sum(keys.astype(jnp.float32) * query[None, :], axis=1)
        scores = jnp.where(inside, scores * key_factors + added, -jnp.inf)
        largest = jnp.maximum(before, jnp.max(scores))
        shrink, weights = jnp.exp(before - largest), jnp.exp(scores - largest)
        weighted = (weights * value_factors)[:, None] * values.astype(jnp.float32)
        return (
            largest,
            total * shrink + jnp.sum(weights),
            sums * shrink + jnp.sum(weighted, axis=0),
        )

    zero = jnp.zeros((), jnp.float32)
    first_round = attend(0, (zero - jnp.inf, zero, jnp.zeros(query.shape, jnp.float32)))
    largest, total, sums = lax.fori_loop(1, rounds, attend, first_round)
    return sums / total, largest + jnp.log(total)


def _num_columns(features: int, held: int) -> int:
    """Returns the columns of a program that holds so many elements of each, a power of two."""
    columns = 1
    while features % (2 * columns) == 0:
        most = _ELEMENTS if features // columns <= _PROGRAMS else _MOST_ELEMENTS
        if 2 * columns * held > most:
            break
        columns *= 2
    return columns


def _options(num_warps: int) -> dict:
    """Returns ``pallas_call``'s options; on a CPU, JAX's interpreter runs the kernel."""
    if jax.default_backend() == "cpu":
        return {"interpret": True}
    return {"compiler_params": triton.CompilerParams(num_warps=num_warps, num_stages=1)}
