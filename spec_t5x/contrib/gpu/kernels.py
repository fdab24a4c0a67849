"""Limits of the kernels in Pallas (Triton), and how they are called.

A step's kernels are short: each takes a few times a read of memory. Two forms compute them. *One by
one*: a program requests all that it reads at once, and multiplies tokens without tensor cores. *In
tiles*: tensor cores multiply tiles of 16 tokens in bfloat16. A token's result is the same, bit for
bit, for any number of tokens of its row, because the same additions compute it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from spec_t5x.types import Array

# Environment variable: "0" disables the kernels; "1" also enables those for several rows, of which
# no GPU has tested the tiles, and models for which XLA may be faster.
SWITCH = "SPEC_T5X_GPU_KERNELS"
# Tokens of a tile: the least that tensor cores multiply, and most new tokens of a row.
TILE = 16
# Most rows of a batch, one by one and in tiles, and most new tokens of a row one by one. The batch
# decides, and not its tokens, so that calls over one and over several are computed alike.
MOST_ROWS, MOST_ROWS_IN_TILES, MOST_TOKENS = 8, 32, 32


class Kernel(NamedTuple):
    """Kernel and its launch, without its operands.

    Attributes:
      function: gets references to the operands and to the results, after ``arguments``.
      arguments: values that the kernel is compiled for.
      grid: numbers of programs.
      results: shapes of the results.
      aliases: pairs of an operand and a result that share memory.
      warps: warps of a program.
      stages: rounds of a loop whose reads are under way.
    """

    function: Callable
    arguments: tuple
    grid: tuple[int, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    aliases: tuple[tuple[int, int], ...] = ()
    warps: int = 1
    stages: int = 1

    def __call__(self, *operands: Any) -> Sequence[Array]:
        """Returns the results; on a CPU, JAX's interpreter runs the kernel."""
        return _call(self, jax.default_backend() == "cpu", operands)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(kernel: Kernel, interpret: bool, operands: tuple) -> Sequence[Array]:
    # Jitted, so that the same kernel is lowered once for all layers of a network.
    params = None
    if not interpret:
        # Here, since JAX 0.11.2 deprecates it: machines without a GPU need no such module.
        from jax.experimental.pallas import triton

        params = triton.CompilerParams(num_warps=kernel.warps, num_stages=kernel.stages)
    return pl.pallas_call(
        functools.partial(kernel.function, *kernel.arguments),
        grid=kernel.grid,
        out_shape=list(kernel.results),
        input_output_aliases=dict(kernel.aliases),
        name=kernel.function.__name__.strip("_"),
        interpret=interpret,
        compiler_params=params,
    )(*operands)


def dot(left: Array, right: Array, right_axis: int) -> Array:
    """Returns a product of tiles in float32, summed over the last axis of ``left``."""
    axes = (((1,), (right_axis,)), ((), ()))
    given = {"precision": lax.Precision.DEFAULT, "preferred_element_type": "float32"}
    return lax.dot_general(left, right, axes, **given)
