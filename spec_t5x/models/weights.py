"""The forms in which a matrix is kept: rounded to int8, and in panels for the CPU kernels.

A decoder step reads every matrix once, so bytes and their order are its time. The CPU kernels
read panels of 64 columns, each stored row after row: memory is read from front to back. A
matrix whose values are all numbers of bfloat16, as of a checkpoint stored in it, is held in
bfloat16 and widened in registers. That is exact: every product has the bits that the float32
matrix gives. Rounding to int8 is not, and is for drafts.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jaxtyping import UInt16

from spec_t5x.machine.cpu_kernels import calls as cpu_kernels
from spec_t5x.types import Array, Float, Float32, Int, Integer, PyTree

# Tables of embeddings, which are read row by row.
_TABLES = ("embedding", "token_embedding")
# Numbers that are looked at in one step.
_PART = 1 << 18


@flax.struct.dataclass
class Rounded:
    """A matrix ``[inner, features]`` in int8, with a scale for each column."""

    values: Integer[Array, "inner features"] | jax.ShapeDtypeStruct
    scales: Float32[Array, "features"] | jax.ShapeDtypeStruct

    @classmethod
    def of(cls, matrix: Float[Array, "inner features"]) -> "Rounded":
        """The matrix with every column's largest value rounded to 127, or to -127."""
        matrix = matrix.astype(jnp.float32)
        largest = jnp.max(jnp.abs(matrix), axis=0)
        scales = jnp.where(largest > 0, largest, 1.0) / 127
        return cls(jnp.round(matrix / scales[None]).astype(jnp.int8), scales)

    def matrix(self) -> Float32[Array, "inner features"]:
        """What was rounded, in float32."""
        return self.values.astype(jnp.float32) * self.scales[None]

    def times(self, inputs: Float[Array, "*rows inner"]) -> Float[Array, "*rows features"]:
        """``inputs @ matrix``, in the inputs' type; no widened copy of the matrix is made."""
        product = jnp.dot(
            inputs, self.values.astype(inputs.dtype), preferred_element_type=jnp.float32
        )
        scales = self.scales.reshape((1,) * (inputs.ndim - 1) + (-1,))
        return (product * scales).astype(inputs.dtype)


@flax.struct.dataclass
class Panels:
    """A matrix ``[inner, features]`` in panels of ``cpu_kernels.PANEL`` columns.

    The last panel is filled up with zeros.
    """

    # float32, bfloat16 or int8, of which ``scales`` has one for each column, the filling's too.
    panels: Float[Array, "panels inner columns"] | Integer[Array, "panels inner columns"]
    scales: Float[Array, "scales"]
    features: int = flax.struct.field(pytree_node=False)

    @classmethod
    def pack(cls, matrix: Float32[Array, "inner features"] | Rounded) -> "Panels":
        """The matrix in panels, bfloat16 where that holds its values exactly. On the host."""
        scales = np.zeros(0, np.float32)
        if isinstance(matrix, Rounded):
            values, scales = np.asarray(matrix.values), np.asarray(matrix.scales)
            scales = np.pad(scales, (0, -len(scales) % cpu_kernels.PANEL))
        else:
            values = _narrow(matrix)
        inner, features = values.shape
        num = -(-features // cpu_kernels.PANEL)
        panels = np.zeros((num, inner, cpu_kernels.PANEL), values.dtype)
        for i, panel in enumerate(panels):
            columns = values[:, i * cpu_kernels.PANEL : (i + 1) * cpu_kernels.PANEL]
            panel[:, : columns.shape[1]] = columns
        return cls(jnp.asarray(panels), jnp.asarray(scales), features)

    def matrix(self) -> Float32[Array, "inner features"]:
        """What was packed, in float32."""
        joined = jnp.swapaxes(self.panels, 0, 1).reshape(self.panels.shape[1], -1)
        if self.scales.size:
            return Rounded(joined, self.scales).matrix()[:, : self.features]
        return joined[:, : self.features].astype(jnp.float32)


@flax.struct.dataclass
class Table:
    """Embeddings whose values are bfloat16's, held as their bits.

    Of an array in bfloat16 XLA for CPUs would widen the whole table for a few of its rows.
    """

    halves: UInt16[Array, "vocab embed"]

    def rows(self, tokens: Int[Array, "*shape"]) -> Float32[Array, "*shape embed"]:
        """The embeddings of some tokens."""
        return _widened(jnp.take(self.halves, tokens, axis=0))

    def whole(self) -> Float32[Array, "vocab embed"]:
        """All of them."""
        return _widened(self.halves)

    @classmethod
    def pack(cls, table: Float32[Array, "vocab embed"]) -> "Table | Array":
        """The table; an array as it is, if its values need float32."""
        values = _narrow(table)
        if values.dtype == np.float32:
            return table
        return cls(jnp.asarray(values.view(np.uint16)))


def rows(table: Table | Array, tokens: Int[Array, "*shape"]) -> Float[Array, "*shape embed"]:
    """The embeddings of some tokens, of a table in either form."""
    return table.rows(tokens) if isinstance(table, Table) else jnp.take(table, tokens, axis=0)


def pack(params: PyTree) -> PyTree:
    """Parameters with their matrices in panels, and embeddings at the width they need.

    Args:
      params: a tree of float32 arrays on one CPU device, by T5X's names.
    """
    return _map_by_name(params, _packed)


def unpack(weights: PyTree) -> PyTree:
    """What ``pack`` was given, of weights or of a whole model that holds them."""

    def unpack_one(leaf: Any) -> Any:
        if isinstance(leaf, Table):
            return leaf.whole()
        return leaf.matrix() if isinstance(leaf, Panels) else leaf

    return jax.tree.map(
        unpack_one, weights, is_leaf=lambda node: isinstance(node, Panels | Rounded | Table)
    )


def rounded(weights: PyTree) -> PyTree:
    """Weights with every matrix in int8; in panels, those that are. Shapes give shapes."""

    def round_one(name: str, leaf: Any) -> Any:
        if name != "kernel":
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(Rounded.of, leaf)
        if isinstance(leaf, Panels):
            return Panels.pack(Rounded.of(leaf.matrix()))
        return Rounded.of(leaf)

    return _map_by_name(weights, round_one)


def _packed(name: str, leaf: Any) -> Any:
    if name == "kernel":
        return Panels.pack(leaf)
    if name in _TABLES:
        return Table.pack(leaf)
    return leaf


def _narrow(values: Float32[Array, "rows columns"]) -> np.ndarray:
    """The values in bfloat16 if it holds all of them exactly, else as they are."""
    values = np.ascontiguousarray(values)
    # bfloat16 is the upper half of a float32.
    halves = values.view(np.uint32)
    parts = np.array_split(halves, 1 + halves.size // _PART)
    if any(np.bitwise_and(part, 0xFFFF).any() for part in parts):
        return values
    return np.right_shift(halves, 16).astype(np.uint16).view(jnp.bfloat16)


def _widened(halves: UInt16[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return lax.bitcast_convert_type(halves.astype(jnp.uint32) << 16, jnp.float32)


def _map_by_name(tree: PyTree, function) -> PyTree:
    flat = flatten_dict(tree)
    return unflatten_dict({path: function(path[-1], leaf) for path, leaf in flat.items()})
