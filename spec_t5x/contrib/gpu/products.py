"""Kernels of products: maps of a few tokens, with the norm before or the residual after them.

One by one, a program is one warp, which waits for no other, and holds some columns of a matrix. In
tiles, a program's reads of columns and states are some rounds ahead of its products.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from spec_t5x.contrib.gpu.attention import Contexts
from spec_t5x.contrib.gpu.kernels import TILE, Kernel, dot
from spec_t5x.contrib.gpu.transposed import Transposed
from spec_t5x.models.layers import activated
from spec_t5x.types import Array, Float, Float32

# Most tokens of a program one by one, and tiles of a program.
_TOKENS, _MOST_TILES = 2, 4
# Elements of matrices in a program's registers, and the most if there would be more programs.
_ELEMENTS, _MOST_ELEMENTS, _PROGRAMS = 1 << 10, 8 << 10, 4 << 10
# Elements of a row that are one array: eight for each thread.
_STEP = 256
# Bytes of reads under way of a program in tiles, and stages. Two programs fit a processor of an
# H100; one fits the 99 KiB of an L4 or A10, some of which other values take.
_AHEAD, _STAGES = 90 << 10, (3, 8)


class _Sizes(NamedTuple):
    """Sizes of a product: tokens and columns of a program, elements of a step, warps, stages."""

    tokens: int
    columns: int
    step: int
    warps: int
    stages: int


class Norm(NamedTuple):
    """RMS norm that is applied to the rows of a product."""

    scale: Float[Array, "inner"]
    epsilon: float


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
    in_tiles: bool = False,
) -> list[Float[Array, "rows features"]]:
    """Computes ``norm(states) @ matrix`` for matrices of one shape, in one kernel.

    Args:
      states: a row for each token, or the tokens' contexts.
      matrices: matrices that ``fits`` accepts: all together if there are activations, else each.
      norm: norm of the states; None for none.
      activations: if not empty, the one result is the product of the branches, each activated.
      residual: added to the one result.
      dtype: type of the results; None for that of ``states``.
      in_tiles: multiply in bfloat16, by tensor cores.
    """
    inner, features = matrices[0].shape
    given = jax.tree.leaves(states)[0]
    shape = jax.ShapeDtypeStruct((given.shape[0], features), dtype or given.dtype)
    pairs = [(matrix.values, matrix.scales) for matrix in matrices]
    groups = [pairs] if activations else [[pair] for pair in pairs]
    if in_tiles:
        function = _multiply_tiles
        sizes = _sizes_in_tiles(given.shape[0], inner, features, groups, norm is not None)
    else:
        function, columns = _multiply, _num_columns(features, inner * len(groups[0]))
        sizes = _Sizes(_TOKENS, columns, min(inner & -inner, _STEP), warps=1, stages=1)
    kernel = Kernel(
        function,
        (sizes, norm and norm.epsilon, tuple(activations)),
        # Programs of the same columns follow each other, and find them in the processors' cache.
        grid=(-(-given.shape[0] // sizes.tokens), features // sizes.columns, len(groups)),
        results=(shape,) * len(groups),
        warps=sizes.warps,
        stages=sizes.stages,
    )
    scale = None if norm is None else norm.scale[None]
    return list(kernel(states, groups, scale, residual))


def _multiply(sizes, epsilon, activations, states, groups, norm_scale, residual, *outputs) -> None:
    first_row = pl.program_id(0) * sizes.tokens
    own = pl.ds(pl.program_id(1) * sizes.columns, sizes.columns)
    num_rows, inner = outputs[0].shape[0], groups[0][0][0].shape[1]
    parts = [pl.ds(start, sizes.step) for start in range(0, inner, sizes.step)]
    # Missing rows repeat the last one.
    rows = [jnp.minimum(first_row + i, num_rows - 1) for i in range(min(sizes.tokens, num_rows))]

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

    _for_each(groups, outputs, compute)


def _multiply_tiles(
    sizes, epsilon, activations, states, groups, norm_scale, residual, *outputs
) -> None:
    first_row = pl.program_id(0) * sizes.tokens
    columns, step = sizes.columns, sizes.step
    own = pl.ds(pl.program_id(1) * columns, columns)
    num_rows, inner = outputs[0].shape[0], groups[0][0][0].shape[1]
    starts = first_row + jnp.arange(TILE)
    # Missing rows repeat the last one.
    tiles = [jnp.minimum(starts + i, num_rows - 1) for i in range(0, sizes.tokens, TILE)]

    def add(group, index, earlier):
        part = pl.ds(index * step, step)
        matrices = [values[own, part].astype(jnp.bfloat16) for values, _ in group]
        scale = None if norm_scale is None else norm_scale[:, part].astype(jnp.float32)
        found = []
        for rows, (squares, *sums) in zip(tiles, earlier, strict=True):
            given = states[rows, part]
            if scale is not None:
                # Squares are on the diagonal: a sum along a row would be one of many threads.
                squares += dot(given, given, 1)
                given = (given.astype(jnp.float32) * scale).astype(jnp.bfloat16)
            products = [dot(given, matrix, 1) for matrix in matrices]
            found.append((squares, *(a + b for a, b in zip(sums, products, strict=True))))
        return found

    def compute(group, output) -> None:
        # Read before the loop, so that no token waits after it.
        added = [0.0 if residual is None else residual[rows, own] for rows in tiles]
        zeros = [jnp.zeros((TILE, TILE))] + [jnp.zeros((TILE, columns))] * len(group)
        sums = lax.fori_loop(
            0, inner // step, functools.partial(add, group), [tuple(zeros)] * len(tiles)
        )
        diagonal = jnp.arange(TILE)[:, None] == jnp.arange(TILE)[None]
        for rows, start, (squares, *results) in zip(tiles, added, sums, strict=True):
            if norm_scale is not None:
                mean = jnp.sum(jnp.where(diagonal, squares, 0.0), axis=1, keepdims=True) / inner
                results = [each * lax.rsqrt(mean + epsilon) for each in results]
            factors = [1.0 if scales is None else scales[:, own] for _, scales in group]
            results = [a * b for a, b in zip(results, factors, strict=True)]
            result = activated(activations, results) if activations else results[0]
            output[rows, own] = (result + start).astype(output.dtype)

    _for_each(groups, outputs, compute)


def _for_each(groups, outputs, compute: Callable) -> None:
    """Computes one group's output: more processors read than if each read all matrices."""
    for i, (group, output) in enumerate(zip(groups, outputs, strict=True)):
        if len(groups) == 1:
            compute(group, output)
        else:
            pl.when(pl.program_id(2) == i)(functools.partial(compute, group, output))


def _num_columns(features: int, held: int) -> int:
    """Returns the columns of a program that holds so many elements of each, a power of two."""
    columns = 1
    while features % (2 * columns) == 0:
        most = _ELEMENTS if features // columns <= _PROGRAMS else _MOST_ELEMENTS
        if 2 * columns * held > most:
            break
        columns *= 2
    return columns


def _sizes_in_tiles(
    rows: int, inner: int, features: int, groups: Sequence[Sequence], is_normed: bool
) -> _Sizes:
    """Returns the sizes of a product in tiles, on whose tokens and stages no bits depend.

    A program has as many columns, up to 64, as leave 128 programs, or 16. No GPU has timed them.
    """
    programs = -(-rows // (TILE * _MOST_TILES))
    tiles = -(-rows // (TILE * programs))
    total = features * sum(map(len, groups))
    wider = (n for n in ((32,) if is_normed else (32, 64)) if features % n == 0)
    columns = max((n for n in wider if total >= 128 * n), default=16)
    step = min(inner & -inner, 128)
    warps = max(2, columns // 16)
    if is_normed:
        # With fewer elements for each warp, Triton stores the states once more to scale them.
        warps = min(warps, max(1, step // 64))
    ahead = 2 * step * (columns * len(groups[0]) + TILE * tiles)
    least, largest = _STAGES
    stages = max(least, min(largest, 1 + _AHEAD // ahead))
    return _Sizes(TILE * tiles, columns, step, warps, stages)
