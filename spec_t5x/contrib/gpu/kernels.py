"""Kernels in Pallas (Triton) for decoder steps: products with norms, attention over caches.

A step's kernels are short: each takes a few times a read of memory. So a program requests all that
it reads at once, and multiplies rows one by one without tensor cores. A row's result is the same,
bit for bit, for any number of rows, because the same additions compute it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

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

# Most rows of a product, and most new tokens of a row in an attention.
MOST_ROWS, MOST_TOKENS = 64, 16
# Most rows of a program.
_ROWS = 8
# Columns of a program: the first for which there are at most so many programs.
_COLUMNS, _PROGRAMS = (8, 16, 32, 64), 300
# Most elements of matrices in a program's registers, and those of each warp.
_MOST_ELEMENTS, _WARP_ELEMENTS = 48 << 10, 1024
# Most rows of a matrix, those of T5 up to large: for XXL, XLA was faster, and XL was not compared.
MOST_INNER = 3072
# Elements of keys that a step of an attention's loop reads (of 64 in a head: 128 keys), its warps,
# and most programs of a head that attend to a source.
_BLOCK_ELEMENTS, _ATTENTION_WARPS, _MOST_PARTS = 8 << 10, 8, 4


class Norm(NamedTuple):
    """RMS norm that is applied to the rows of a product."""

    scale: Float[Array, "inner"]
    epsilon: float


class Contexts(NamedTuple):
    """Contexts of parts of an attention's keys, each averaged by the softmax of its own scores."""

    averages: Float32[Array, "*tokens parts joined"]
    # Logarithms of the sums of the scores' exponentials.
    logs: Float32[Array, "*tokens parts heads"]

    def joined(self, token: tuple, features: Array) -> Float32[Array, "*token features"]:
        """Returns some features of the contexts of all keys, for an index of tokens."""
        num_parts, joined = self.averages.shape[-2:]
        heads = features // (joined // self.logs.shape[-1])
        logs = [self.logs[*token, part, heads] for part in range(num_parts)]
        largest = functools.reduce(jnp.maximum, logs)
        weights = [jnp.exp(each - largest) for each in logs]
        averages = (self.averages[*token, part, features] for part in range(num_parts))
        weighted = (weight * each for weight, each in zip(weights, averages, strict=True))
        return sum(weighted) / sum(weights)


def fits(*matrices: Transposed) -> bool:
    """Returns True if a program can hold columns of the matrices; sides are multiples of 16."""
    sides = (size for matrix in matrices for size in matrix.shape)
    held = sum(_COLUMNS[0] * matrix.shape[0] for matrix in matrices)
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
      states: at most ``MOST_ROWS`` rows, or contexts of so many tokens.
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
    warps = max(1, min(8, columns * inner * len(groups[0]) // _WARP_ELEMENTS))
    call = pl.pallas_call(
        functools.partial(_multiply, columns, norm and norm.epsilon, tuple(activations)),
        grid=(features // columns, len(groups), -(-given.shape[0] // _ROWS)),
        out_shape=[shape] * len(groups),
        name="multiply",
        **_options(1 << warps.bit_length() - 1),
    )
    return list(call(states, groups, norm and norm.scale, residual))


def _multiply(
    columns, epsilon, activations, states, groups, norm_scale, residual, *outputs
) -> None:
    own = pl.ds(pl.program_id(0) * columns, columns)
    matrix_index, first_row = pl.program_id(1), pl.program_id(2) * _ROWS
    num_rows, inner = outputs[0].shape[0], groups[0][0][0].shape[1]
    step = inner & -inner
    parts = [pl.ds(start, step) for start in range(0, inner, step)]

    def read_row(row) -> list[Float32[Array, "step"]]:
        if isinstance(states, Contexts):
            return [states.joined((row,), part.start + jnp.arange(step)) for part in parts]
        wide = [states[row, part].astype(jnp.float32) for part in parts]
        if norm_scale is None:
            return wide
        mean = sum(jnp.sum(each * each) for each in wide) / inner
        inverse = lax.rsqrt(mean + epsilon)
        scales = (norm_scale[part].astype(jnp.float32) for part in parts)
        return [each * inverse * scale for each, scale in zip(wide, scales, strict=True)]

    def product(row: list[Array], matrix: list[Array], scales: Array | None) -> Array:
        pairs = zip(row, matrix, strict=True)
        total = jnp.sum(sum(part.astype(jnp.float32) * each[None, :] for each, part in pairs), 1)
        return total if scales is None else total * scales

    def compute(group, output) -> None:
        read = [
            ([values[own, part] for part in parts], None if scales is None else scales[0, own])
            for values, scales in group
        ]
        for i in range(min(_ROWS, num_rows)):
            # Missing rows repeat the last one.
            i = jnp.minimum(first_row + i, num_rows - 1)
            row = read_row(i)
            results = [product(row, *each) for each in read]
            result = activated(activations, results) if activations else results[0]
            if residual is not None:
                result += residual[i, own].astype(jnp.float32)
            output[i, own] = result.astype(output.dtype)

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
        grid=keys.shape[:2],
        out_shape=shapes,
        input_output_aliases={0: 1, 1: 2},
        name="attend_to_text",
        **_options(_ATTENTION_WARPS),
    )(keys, values, list(new), places, by_distance)


def _attend_to_text(keys, values, new, places, table, *outputs):
    contexts, kept_keys, kept_values = outputs
    in_slots = isinstance(places, tuple)
    row, head = pl.program_id(0), pl.program_id(1)
    (_, _, length, head_dim), tokens = keys.shape, range(contexts.shape[1])
    own = pl.ds(head * head_dim, head_dim)
    queries, new_keys, new_values = ([each[row, token, own] for token in tokens] for each in new)
    if in_slots:
        new_slots, positions, slot_positions, visible = places
        new_slots, positions = (
            [each[row, token] for token in tokens] for each in (new_slots, positions)
        )
        num = length
    else:
        first, added = places[row], len(tokens)
        # As in `lax.dynamic_update_slice`, tokens that do not fit are moved back.
        new_slots = [jnp.clip(first, 0, length - added) + token for token in tokens]
        positions = [first + token for token in tokens]
        num = jnp.clip(first + added, added, length)

    def read(slots, fresh_entries, cached):
        # New entries are not read from the cache: other threads may not have written them yet.
        found = cached[row, head, slots, :]
        for fresh, slot in zip(fresh_entries, new_slots, strict=True):
            found = jnp.where((slots == slot)[:, None], fresh[None, :], found)
        return found

    def bias(slots, token):
        at = slot_positions[row, slots] if in_slots else slots
        distances = positions[token] - at
        seen = visible[row, token, slots] if in_slots else distances >= 0
        if table is None:
            return jnp.where(seen, 0.0, MASKED)
        of_pairs = table[head, jnp.clip(distances, 0, length - 1)].astype(jnp.float32)
        return jnp.where(seen, of_pairs, MASKED)

    found = _contexts(
        queries,
        0,
        num,
        _BLOCK_ELEMENTS // head_dim,
        lambda slots: (read(slots, new_keys, keys), 1.0),
        lambda slots: (read(slots, new_values, values), 1.0),
        bias,
    )
    for token, slot in zip(tokens, new_slots, strict=True):
        contexts[row, token, own] = found[token][0].astype(contexts.dtype)
        kept_keys[row, head, slot, :] = new_keys[token]
        kept_values[row, head, slot, :] = new_values[token]


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
    (batch, num, joined), (_, heads, length, head_dim) = queries.shape, keys.shape
    blocks = -(-length // (_BLOCK_ELEMENTS // head_dim))
    blocks_each = -(-blocks // _MOST_PARTS)
    parts = -(-blocks // blocks_each)
    sizes = (batch, num, parts, joined), (batch, num, parts, heads)
    call = pl.pallas_call(
        functools.partial(_attend_to_source, blocks_each * _BLOCK_ELEMENTS // head_dim),
        grid=(batch, heads, parts),
        out_shape=[jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes],
        name="attend_to_source",
        **_options(_ATTENTION_WARPS),
    )
    return Contexts(*call(queries, keys, values, bias, list(scales)))


def _attend_to_source(part_length, queries, keys, values, source_bias, scales, averages, logs):
    key_scales, value_scales = scales or (None, None)
    row, head, part = (pl.program_id(axis) for axis in range(3))
    given = row // (queries.shape[0] // keys.shape[0])
    (_, _, length, head_dim), tokens = keys.shape, range(queries.shape[1])
    first = part * part_length
    own = pl.ds(head * head_dim, head_dim)

    def read(slots, cached, scales):
        factors = 1.0 if scales is None else scales[given, head, 0, slots]
        return cached[given, head, slots, :], factors

    found = _contexts(
        [queries[row, token, own] for token in tokens],
        first,
        jnp.minimum(first + part_length, length),
        min(_BLOCK_ELEMENTS // head_dim, 1 << (length - 1).bit_length()),
        lambda slots: read(slots, keys, key_scales),
        lambda slots: read(slots, values, value_scales),
        lambda slots, token: source_bias[given, slots],
    )
    for token in tokens:
        averages[row, token, part, own], logs[row, token, part, head] = found[token]


def _contexts(
    queries: Sequence[Float[Array, "head_dim"]],
    first: Int[Array, ""] | int,
    end: Int[Array, ""] | int,
    block: int,
    read_keys: Callable[[Array], tuple[Array, Array | float]],
    read_values: Callable[[Array], tuple[Array, Array | float]],
    bias: Callable[[Array, int], Array],
) -> list[tuple[Float32[Array, "head_dim"], Float32[Array, ""]]]:
    """Averages values of the slots from ``first`` to before ``end`` by a softmax in one pass.

    Also returns the logarithm of the sum of the scores' exponentials. The functions get slots ``[keys]`` and return keys or values ``[keys, head_dim]``, their factors
    ``[keys]``, or the bias ``[keys]`` of a token. The pass keeps the largest score so far, by which
    earlier sums are rescaled (Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3).
    """
    (head_dim,) = queries[0].shape

    def add(index, carry):
        slots = first + index * block + jnp.arange(block)
        inside = slots < end
        slots = jnp.minimum(slots, end - 1)
        (keys, key_factors), (values, value_factors) = read_keys(slots), read_values(slots)
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)

        def attend(token: int, largest, total, sums):
            query = queries[token].astype(jnp.float32)
            scores = jnp.sum(keys * query[None, :], axis=1) * key_factors + bias(slots, token)
            scores = jnp.where(inside, scores, -jnp.inf)
            grown = jnp.maximum(largest, jnp.max(scores))
            weights = jnp.exp(scores - grown)
            shrink = jnp.exp(largest - grown)
            weighted = jnp.sum((weights * value_factors)[:, None] * values, axis=0)
            return grown, total * shrink + jnp.sum(weights), sums * shrink + weighted

        return [attend(token, *each) for token, each in enumerate(carry)]

    zero = jnp.zeros((), jnp.float32)
    start = (zero - jnp.inf, zero, jnp.zeros(head_dim, jnp.float32))
    rounds = (end - first + block - 1) // block
    carry = lax.fori_loop(0, rounds, add, [start] * len(queries))
    return [(sums / total, largest + jnp.log(total)) for largest, total, sums in carry]


def _num_columns(features: int, held: int) -> int:
    """Returns the columns of a program (see ``_COLUMNS``) that holds so many elements of each."""
    fitting = [
        columns
        for columns in _COLUMNS
        if features % columns == 0 and (columns == _COLUMNS[0] or columns * held <= _MOST_ELEMENTS)
    ]
    few = (columns for columns in fitting if features // columns <= _PROGRAMS)
    return next(few, fitting[-1])


def _options(num_warps: int) -> dict:
    """Returns ``pallas_call``'s options; on a CPU, JAX's interpreter runs the kernel."""
    if jax.default_backend() == "cpu":
        return {"interpret": True}
    return {"compiler_params": triton.CompilerParams(num_warps=num_warps, num_stages=1)}
