"""GPU kernels index inside their arrays; JAX's interpreter clamps indices and cannot show it."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from spec_t5x.contrib.gpu import attention, kernels, products
from spec_t5x.contrib.gpu.transposed import Transposed
from spec_t5x.loops.tree_nodes import tree_nodes
from spec_t5x.models.weights import Rounded
from spec_t5x.sampling.tree_shapes import Tree
from tests.contrib.gpu.test_products import drawn


@dataclasses.dataclass
class Reference:
    """Array in memory, which checks every index."""

    values: np.ndarray

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)

    def __getitem__(self, index):
        return jnp.asarray(self.values[self._checked(index)])

    def __setitem__(self, index, values):
        self.values[self._checked(index)] = values

    def _checked(self, index):
        checked = []
        for part, length in zip(
            index if isinstance(index, tuple) else (index,), self.shape, strict=True
        ):
            if isinstance(part, slice):
                assert part == slice(None)
                checked.append(part)
                continue
            is_slice = isinstance(part, pl.Slice)
            first = np.asarray(part.start if is_slice else part)
            end = first + (part.size if is_slice else 1)
            assert first.min() >= 0 and end.max() <= length, f"{index} of {self.shape}"
            checked.append(slice(int(first), int(end)) if is_slice else first)
        return tuple(checked)


def run(kernel, *operands):
    """Runs the programs of a kernel one after another, on references."""
    leaves, tree = jax.tree.flatten(operands)
    given = [Reference(np.array(leaf)) for leaf in leaves]
    results = [Reference(np.zeros(each.shape, each.dtype)) for each in kernel.results]
    for operand, result in kernel.aliases:
        results[result] = given[operand]
    for place in np.ndindex(kernel.grid):
        with mock.patch.object(pl, "program_id", lambda axis, at=place: jnp.int32(at[axis])):
            kernel.function(*kernel.arguments, *jax.tree.unflatten(tree, given), *results)
    return [jnp.asarray(each.values) for each in results]


def multiply(rows, in_tiles):
    dtype = "bfloat16" if in_tiles else "float32"
    states, residual = drawn(0, rows, 32, dtype=dtype), drawn(1, rows, 48, dtype=dtype)
    matrices = [Transposed.of(drawn(i, 32, 48, dtype=dtype)) for i in (2, 3)]
    norm = products.Norm(jnp.ones(32, dtype), 0.1)
    found = products.multiply(states, matrices, norm, in_tiles=in_tiles)
    in_int8 = [Transposed.of(Rounded.of(drawn(4, 32, 48)))]
    return found + products.multiply(states, in_int8, residual=residual, in_tiles=in_tiles)


def attend_to_text(starts, in_tiles, is_tree=False):
    dtype, num = "bfloat16" if in_tiles else "float32", 3
    new = [drawn(i, len(starts), num, 32, dtype=dtype) for i in range(3)]
    cache = [drawn(i, len(starts), 2, 40, 16, dtype=dtype) for i in (3, 4)]
    places = jnp.asarray(starts, jnp.int32)
    if is_tree:
        places = tree_nodes(Tree((2,)), jnp.zeros((len(starts), num), jnp.int32), places, 40)
    table = drawn(5, 2, 40)
    return attention.attend_to_text(new, *cache, places, table, in_tiles=in_tiles)


def attend_to_source(length, in_tiles):
    dtype = "bfloat16" if in_tiles else "float32"
    queries = drawn(0, 2, 3, 32, dtype=dtype)
    keys = drawn(1, 1, 2, length, 16, dtype=dtype)
    given = queries, keys, keys, jnp.zeros((1, length))
    return jax.tree.leaves(attention.attend_to_source(*given, in_tiles=in_tiles))


@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        *(functools.partial(multiply, rows) for rows in (3, 17)),
        # The last rows have ended: their tokens do not fit.
        functools.partial(attend_to_text, (0, 8, 37, 39)),
        functools.partial(attend_to_text, (1, 37), is_tree=True),
        # The last of three parts of two rounds has one round.
        *(functools.partial(attend_to_source, length) for length in (7, 40, 72)),
    ],
)
def test_no_index_is_outside(call, in_tiles, monkeypatch):
    # Rounds of 16 keys.
    monkeypatch.setattr(attention, "_BLOCK_ELEMENTS", 256)
    monkeypatch.setattr(products, "_num_columns", lambda features, held: 16)
    expected = call(in_tiles=in_tiles)
    monkeypatch.setattr(kernels.Kernel, "__call__", run)
    # On the CPU even if there is a GPU, which would launch each operation alone.
    with jax.default_device(jax.devices("cpu")[0]), jax.disable_jit():
        found = call(in_tiles=in_tiles)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=2e-2)
