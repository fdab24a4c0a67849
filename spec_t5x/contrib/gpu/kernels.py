"""Kernels in Pallas (Triton) for decoder steps: products with norms, attention over caches.

Tokens are computed in blocks of 16 to ``MOST_ROWS`` rows, the least that tensor cores multiply.
Missing rows repeat the last one, which is written several times with the same values. A row's
result is the same, bit for bit, for any number of rows up to 16: its products are added in the same
order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spec_t5x.interfaces import Nodes
from spec_t5x.models.attention import MASKED
from spec_t5x.models.layers import activated
from spec_t5x.types import Array, Float, Float32, Int, Shaped

# Most rows of a product, and most new tokens of a row in an attention.
MOST_ROWS, MOST_TOKENS = 64, 16
# Rows of a matrix that a step of a product's loop reads, and keys that one of an attention's reads.
_INNER, _KEYS = 128, 64
# Numbers of columns that a program computes: the first for which there are few programs (some
# three for each of an H100's 132 processors), or the last for which three steps' reads fit.
_COLUMNS, _PROGRAMS = (16, 32, 64, 128), 400
# Bytes of shared memory of a program, which all GPUs of compute capability 8.0 or more have.
_SHARED = 96 << 10


class Matrix(NamedTuple):
    """Matrix ``[inner, features]``: bfloat16, float32, or int8 with a scale for each column."""

    values: Shaped[Array, "inner features"]
    scales: Float32[Array, "1 features"] | None = None


class Norm(NamedTuple):
    """RMS norm that is applied to the rows of a product."""

    scale: Float[Array, "inner"]
    epsilon: float


def fits(matrix: Matrix) -> bool:
    """Returns True if ``multiply`` can read the matrix: its sides are multiples of 16."""
    return all(size % 16 == 0 for size in matrix.values.shape)


def multiply(
    states: Float[Array, "rows inner"],
    matrices: Sequence[Matrix],
    norm: Norm | None = None,
    *,
    activations: Sequence[str] = (),
    residual: Float[Array, "rows features"] | None = None,
    dtype: str | None = None,
) -> list[Float[Array, "rows features"]]:
    """Computes ``norm(states) @ matrix`` for matrices of one shape, in one kernel.

    Args:
      states: at most ``MOST_ROWS`` rows.
      matrices: matrices that ``fits`` accepts.
      norm: norm of the states; None for none.
      activations: if not empty, the one result is the product of the branches, each activated.
      residual: added to the one result.
      dtype: type of the results; None for that of ``states``.
    """
    features = matrices[0].values.shape[1]
    shape = jax.ShapeDtypeStruct((states.shape[0], features), dtype or states.dtype)
    num_results, rows = 1 if activations else len(matrices), _rows(states.shape[0]).size
    step = _largest_divisor(states.shape[1], _INNER)
    size, matrix_size = states.dtype.itemsize, matrices[0].values.dtype.itemsize

    def read_bytes(columns: int) -> int:
        return step * (rows * size + len(matrices) * columns * max(size, matrix_size))

    columns = _num_columns(features, read_bytes)
    call = pl.pallas_call(
        functools.partial(_multiply, columns, step, norm and norm.epsilon, tuple(activations)),
        grid=(features // columns,),
        out_shape=[shape] * num_results,
        name="multiply",
        **_options(4, read_bytes(columns), most_stages=4),
    )
    return list(call(states, list(matrices), norm and norm.scale, residual))


def _multiply(
    columns, step, epsilon, activations, states, matrices, norm_scale, residual, *outputs
) -> None:
    rows, inner = _rows(states.shape[0]), states.shape[1]
    own = pl.ds(pl.program_id(0) * columns, columns)

    def read(index: Array) -> Array:
        return states[rows, pl.ds(index * step, step)]

    inverse = None
    if norm_scale is not None:

        def add(index, total):
            return total + jnp.sum(lax.square(read(index).astype(jnp.float32)), axis=1)

        total = lax.fori_loop(0, inner // step, add, jnp.zeros(rows.shape, jnp.float32))
        inverse = lax.rsqrt(total / inner + epsilon)[:, None]

    def add_products(index, sums):
        part, here = read(index), pl.ds(index * step, step)
        if inverse is not None:
            normed = (part.astype(jnp.float32) * inverse).astype(part.dtype)
            part = normed * norm_scale[here].astype(part.dtype)[None, :]
        read_matrices = (matrix.values[here, own].astype(part.dtype) for matrix in matrices)
        return [total + _dot(part, read) for total, read in zip(sums, read_matrices, strict=True)]

    zeros = [jnp.zeros((rows.size, columns), jnp.float32)] * len(matrices)
    sums = lax.fori_loop(0, inner // step, add_products, zeros)
    for i, matrix in enumerate(matrices):
        if matrix.scales is not None:
            sums[i] = sums[i] * matrix.scales[0, own][None, :]
    dtype = outputs[0].dtype
    results = [total.astype(dtype) for total in sums]
    if activations:
        wide = activated(activations, (result.astype(jnp.float32) for result in results))
        results = [wide.astype(dtype)]
    if residual is not None:
        results = [residual[rows, own] + results[0]]
    for output, result in zip(outputs, results, strict=True):
        output[rows, own] = result


def attend_to_text(
    queries: Float[Array, "batch new joined"],
    new_keys: Float[Array, "batch new joined"],
    new_values: Float[Array, "batch new joined"],
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
    in those of nodes. ``by_distance`` is the bias of keys so many positions before their query.

    Returns:
      The contexts, and the cache's keys and values, which are written in place.
    """
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (queries, keys, values)]
    if isinstance(places, Nodes):
        places = places.slots, places.positions, places.slot_positions, places.visible
    return pl.pallas_call(
        _attend_to_text,
        grid=keys.shape[:2],
        out_shape=shapes,
        input_output_aliases={3: 1, 4: 2},
        name="attend_to_text",
        **_options(4, _key_bytes(queries, keys), most_stages=2),
    )(queries, new_keys, new_values, keys, values, places, by_distance)


def _attend_to_text(queries, new_keys, new_values, keys, values, places, table, *outputs):
    contexts, kept_keys, kept_values = outputs
    in_slots = isinstance(places, tuple)
    row, head = pl.program_id(0), pl.program_id(1)
    (_, _, length, head_dim), new = keys.shape, queries.shape[1]
    own, tokens = pl.ds(head * head_dim, head_dim), _rows(new)
    if in_slots:
        new_slots, positions, slot_positions, visible = places
        new_slots, positions = new_slots[row, tokens], positions[row, tokens]
        num = length
    else:
        first = places[row]
        # As in `lax.dynamic_update_slice`, tokens that do not fit are moved back.
        new_slots, positions = jnp.clip(first, 0, length - new) + tokens, first + tokens
        num = jnp.clip(first + new, new, length)
    for kept, given in ((kept_keys, new_keys), (kept_values, new_values)):
        kept[row, head, new_slots, :] = given[row, tokens, own]

    def read(slots, given, cached):
        # New entries are read from the arguments: other threads may not have written them yet.
        places = jnp.where(new_slots[None, :] == slots[:, None], tokens[None, :], -1)
        place = jnp.max(places, axis=1)
        fresh = given[row, jnp.maximum(place, 0), own]
        return jnp.where((place >= 0)[:, None], fresh, cached[row, head, slots, :])

    def bias(slots):
        at = slot_positions[row, slots] if in_slots else slots
        distances = positions[:, None] - at[None, :]
        seen = distances >= 0
        if in_slots:
            seen = visible[row, tokens[:, None], slots[None, :]]
        if table is None:
            return jnp.where(seen, 0.0, MASKED)
        of_pairs = table[head, jnp.clip(distances, 0, length - 1)].astype(jnp.float32)
        return jnp.where(seen, of_pairs, MASKED)

    contexts[row, tokens, own] = _contexts(
        queries[row, tokens, own],
        num,
        length,
        lambda slots: (read(slots, new_keys, keys), 1.0),
        lambda slots: (read(slots, new_values, values), 1.0),
        bias,
    )


def attend_to_source(
    queries: Float[Array, "batch new joined"],
    keys: Shaped[Array, "inputs heads source head_dim"],
    values: Shaped[Array, "inputs heads source head_dim"],
    bias: Float32[Array, "inputs source"],
    scales: Sequence[Float[Array, "inputs heads 1 source"]] = (),
) -> Float[Array, "batch new joined"]:
    """Attends from at most ``MOST_TOKENS`` tokens of each row to the keys and values of its input.

    ``bias`` is added to the scores. int8 keys and values have the two ``scales``.
    """
    return pl.pallas_call(
        _attend_to_source,
        grid=(queries.shape[0], keys.shape[1]),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        name="attend_to_source",
        **_options(8, _key_bytes(queries, keys), most_stages=3),
    )(queries, keys, values, bias, list(scales))


def _attend_to_source(queries, keys, values, source_bias, scales, contexts):
    key_scales, value_scales = scales or (None, None)
    row, head = pl.program_id(0), pl.program_id(1)
    given = row // (queries.shape[0] // keys.shape[0])
    (_, _, length, head_dim), tokens = keys.shape, _rows(queries.shape[1])
    own = pl.ds(head * head_dim, head_dim)

    def read(slots, cached, scales):
        factors = 1.0 if scales is None else scales[given, head, 0, slots][None, :]
        return cached[given, head, slots, :].astype(queries.dtype), factors

    contexts[row, tokens, own] = _contexts(
        queries[row, tokens, own],
        length,
        length,
        lambda slots: read(slots, keys, key_scales),
        lambda slots: read(slots, values, value_scales),
        lambda slots: source_bias[given, slots][None, :],
    )


def _contexts(
    queries: Float[Array, "tokens head_dim"],
    num: Int[Array, ""] | int,
    length: int,
    read_keys: Callable[[Array], tuple[Array, Array | float]],
    read_values: Callable[[Array], tuple[Array, Array | float]],
    bias: Callable[[Array], Array],
) -> Float[Array, "tokens head_dim"]:
    """Averages values of the first ``num`` of ``length`` slots, by a softmax in one pass.

    The functions get slots ``[keys]`` and return keys or values ``[keys, head_dim]``, their factors
    ``[1, keys]``, or the bias ``[tokens, keys]``. The pass keeps the largest score so far, by which
    earlier sums are rescaled (Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3).
    """

    def add(block, carry):
        largest, total, sums = carry
        slots = block * _KEYS + jnp.arange(_KEYS)
        inside = slots < length
        slots = jnp.minimum(slots, length - 1)
        keys, factors = read_keys(slots)
        scores = _dot(queries, keys.T) * factors + bias(slots)
        scores = jnp.where(inside[None, :], scores, -jnp.inf)
        grown = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - grown[:, None])
        shrink = jnp.exp(largest - grown)
        values, factors = read_values(slots)
        weighted = _dot((weights * factors).astype(values.dtype), values)
        return grown, total * shrink + jnp.sum(weights, axis=1), sums * shrink[:, None] + weighted

    tokens, head_dim = queries.shape
    start = (
        jnp.full(tokens, -jnp.inf, jnp.float32),
        jnp.zeros(tokens, jnp.float32),
        jnp.zeros((tokens, head_dim), jnp.float32),
    )
    _, total, sums = lax.fori_loop(0, (num + _KEYS - 1) // _KEYS, add, start)
    return (sums / total[:, None]).astype(queries.dtype)


def _rows(num: int) -> Int[Array, "rows"]:
    """Returns ``num`` rows' indices, the last repeated up to a power of two of at least 16."""
    return jnp.minimum(jnp.arange(max(16, 1 << (num - 1).bit_length())), num - 1)


def _num_columns(features: int, read_bytes: Callable[[int], int]) -> int:
    """Returns the columns of a program (see ``_COLUMNS``) that reads so many bytes in a step."""
    dividing = [columns for columns in _COLUMNS if features % columns == 0]
    fitting = [columns for columns in dividing if 3 * read_bytes(columns) <= _SHARED]
    few = (columns for columns in fitting if features // columns <= _PROGRAMS)
    return next(few, (fitting or dividing[:1])[-1])


def _key_bytes(queries: Float[Array, "..."], keys: Shaped[Array, "..."]) -> int:
    """Returns the bytes of keys and values that a step of an attention's loop reads."""
    return 2 * _KEYS * keys.shape[-1] * queries.dtype.itemsize


def _largest_divisor(size: int, most: int) -> int:
    """Returns the largest power of two, at most ``most``, that divides ``size``."""
    return min(most, size & -size)


def _dot(left: Array, right: Array) -> Float32[Array, "rows columns"]:
    """Multiplies in float32; float32 factors without rounding them to TF32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)


def _options(num_warps: int, read_bytes: int, most_stages: int) -> dict:
    """Returns ``pallas_call``'s options for a loop; on a CPU, JAX's interpreter runs the kernel.

    Stages are the steps of the loop whose reads, of ``read_bytes`` each, are on the way at a time.
    """
    if jax.default_backend() == "cpu":
        return {"interpret": True}
    num_stages = max(1, min(most_stages, _SHARED // read_bytes))
    return {"compiler_params": triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)}
