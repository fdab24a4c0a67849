"""The forms in which a matrix is kept: rounded to few bits, in panels for the CPU kernels.

A decoder step reads every matrix once, so bytes and their order are its time. The CPU kernels
read panels of 64 columns, each stored row after row: memory is read from front to back. A
matrix whose values are all numbers of bfloat16, as of a checkpoint stored in it, is held in
bfloat16 and widened in registers. That is exact: every product has the bits that the float32
matrix gives. Rounding to int8 or int4 is not: it makes another model.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jaxtyping import UInt16

from spec_t5x.machine.cpu_kernels import calls as cpu_kernels
from spec_t5x.names import INT4, INT8
from spec_t5x.types import Array, Float, Float32, Int, Integer, PyTree

# Tables of embeddings, which are read row by row.
_TABLES = ("embedding", "token_embedding")
# An encoder's own embedding, which is no output layer.
_OF_SOURCES = "source_embedder"
# Numbers that are looked at in one step.
_PART = 1 << 18

# Bits of rounded weights, by the names that options have for them.
BITS = {INT8: 8, INT4: 4}
# Rows that share a scale in int4, as the kernels have it. In int8 all of them do.
GROUP = 64


@flax.struct.dataclass
class Rounded:
    """A matrix ``[inner, features]`` in int8 or int4, with a scale for each group of a column."""

    values: Integer[Array, "inner features"] | jax.ShapeDtypeStruct
    scales: Float32[Array, "groups features"] | jax.ShapeDtypeStruct

    @classmethod
    def of(cls, matrix: Float[Array, "inner features"], bits: int = 8) -> "Rounded":
        """The matrix with the largest value of every group rounded to 127, in 4 bits to 7.

        Args:
          matrix: in any type of floats.
          bits: 8, for which a column is one group, or 4, for groups of ``GROUP`` rows (of the
            last one there may be fewer).
        """
        inner, features = matrix.shape
        group = inner if bits == 8 else GROUP
        padded = jnp.pad(matrix.astype(jnp.float32), ((0, -inner % group), (0, 0)))
        grouped = padded.reshape(-1, group, features)
        largest = jnp.max(jnp.abs(grouped), axis=1)
        scales = jnp.where(largest > 0, largest, 1.0) / (2 ** (bits - 1) - 1)
        # Of 12 bits: products with the values are exact, so that rounding twice is rounding once.
        scales = lax.reduce_precision(scales, exponent_bits=8, mantissa_bits=11)
        values = jnp.round(grouped / scales[:, None]).reshape(padded.shape)[:inner]
        return cls(values.astype(jnp.int8 if bits == 8 else jnp.int4), scales)

    def matrix(self) -> Float32[Array, "inner features"]:
        """What was rounded, in float32."""
        inner = self.values.shape[0]
        group = GROUP if self.values.dtype == jnp.int4 else inner
        return self.values.astype(jnp.float32) * jnp.repeat(self.scales, group, axis=0)[:inner]

    def times(self, inputs: Float[Array, "*rows inner"]) -> Float[Array, "*rows features"]:
        """``inputs @ matrix``, in the inputs' type; no widened copy of the matrix is made."""
        if self.values.dtype == jnp.int4:
            return jnp.dot(inputs, self.matrix().astype(inputs.dtype))
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

    # float32, bfloat16 or int8; or uint8, two numbers of int4 in each: the upper one is of the
    # column half a panel further on.
    panels: Float[Array, "panels inner columns"] | Integer[Array, "panels inner columns"]
    # Of rounded weights, the filling's too.
    scales: Float[Array, "panels groups width"] | None
    features: int = flax.struct.field(pytree_node=False)

    @classmethod
    def pack(cls, matrix: Float32[Array, "inner features"] | Rounded) -> "Panels":
        """The matrix in panels, bfloat16 where that holds its values exactly. On the host."""
        if isinstance(matrix, Rounded):
            values = np.asarray(matrix.values)
            scales = jnp.asarray(_in_panels(np.asarray(matrix.scales)))
        else:
            values, scales = _narrow(matrix), None
        is_int4 = values.dtype == jnp.int4
        panels = _in_panels(values.astype(np.int8) if is_int4 else values)
        if is_int4:
            first, second = np.split(panels.view(np.uint8), 2, axis=2)
            panels = np.bitwise_and(first, 15) | np.left_shift(second, 4)
        return cls(jnp.asarray(panels), scales, values.shape[1])

    def matrix(self) -> Float32[Array, "inner features"]:
        """What was packed, in float32."""
        panels = self.panels
        if panels.dtype == jnp.uint8:
            halves = jnp.stack([panels << 4, panels], axis=2).astype(jnp.int8) >> 4
            panels = halves.reshape(*panels.shape[:2], -1)
        values = _joined(panels)[:, : self.features]
        if self.scales is None:
            return values.astype(jnp.float32)
        is_int4 = self.panels.dtype == jnp.uint8
        scales = _joined(self.scales)[:, : self.features]
        return Rounded(values.astype(jnp.int4) if is_int4 else values, scales).matrix()


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


@flax.struct.dataclass
class TiedTable:
    """Embeddings that are looked up as they are and, as the output layer, are rounded."""

    table: Table | Array | jax.ShapeDtypeStruct
    output: Panels | Rounded  # [embed, vocab]


def rows(
    table: TiedTable | Table | Array, tokens: Int[Array, "*shape"]
) -> Float[Array, "*shape embed"]:
    """The embeddings of some tokens, of a table in any form."""
    if isinstance(table, TiedTable):
        table = table.table
    return table.rows(tokens) if isinstance(table, Table) else jnp.take(table, tokens, axis=0)


def pack(params: PyTree) -> PyTree:
    """Parameters with their matrices in panels, and embeddings at the width they need.

    Args:
      params: a tree of float32 arrays on one CPU device, by T5X's names.
    """
    return _map_by_path(params, lambda path, leaf: packed(path[-1], leaf))


def packed(name: str, leaf: Float32[Array, "..."]) -> Any:
    """``pack`` of one parameter, by the last part of its path."""
    if name == "kernel":
        return Panels.pack(leaf)
    leaf = jnp.asarray(leaf)
    return Table.pack(leaf) if name in _TABLES else leaf


def is_packed(params: PyTree) -> bool:
    """Whether ``pack`` made this tree."""
    return any(isinstance(leaf, Panels) for leaf in flatten_dict(params).values())


def unpack(weights: PyTree) -> PyTree:
    """What ``pack`` was given, of weights or of a whole model that holds them.

    Of tied embeddings it is what is looked up.
    """

    def unpack_one(leaf: Any) -> Any:
        if isinstance(leaf, TiedTable):
            leaf = leaf.table
        if isinstance(leaf, Table):
            return leaf.whole()
        return leaf.matrix() if isinstance(leaf, Panels) else leaf

    forms = Panels | Rounded | Table | TiedTable
    return jax.tree.map(unpack_one, weights, is_leaf=lambda node: isinstance(node, forms))


def rounded(weights: PyTree, bits: int = 8, *, tied: bool) -> PyTree:
    """Weights with every matrix in few bits; in panels, those that are. Shapes give shapes.

    Args:
      weights: of a model.
      bits: 8 or 4.
      tied: whether the embeddings are its output layer, which is rounded beside them then.
    """
    in_panels = is_packed(weights)

    def round_one(path: tuple[str, ...], leaf: Any) -> Any:
        name = path[-1]
        if name == "kernel":
            return _rounded(leaf, bits, in_panels)
        if not (tied and name in _TABLES) or path[0] == _OF_SOURCES:
            return leaf
        table = leaf.table if isinstance(leaf, TiedTable) else leaf
        return TiedTable(table, _rounded(_transposed(table), bits, in_panels))

    return _map_by_path(weights, round_one)


def placed(
    weight: TiedTable | Rounded | Array,
    sharding: jax.NamedSharding,
    place: Callable[[Array | jax.ShapeDtypeStruct, jax.NamedSharding], Any],
) -> Any:
    """A weight with its arrays, or shapes, placed by ``place(array, sharding)``.

    ``sharding`` is the parameter's: rounded values lie as it does, a tied output layer as its
    transpose does, and scales are whole on every device.
    """
    if isinstance(weight, TiedTable):
        output = placed(weight.output, _transposed_sharding(sharding), place)
        return TiedTable(place(weight.table, sharding), output)
    if isinstance(weight, Rounded):
        everywhere = jax.NamedSharding(sharding.mesh, jax.P())
        return Rounded(place(weight.values, sharding), place(weight.scales, everywhere))
    return place(weight, sharding)


def _rounded(matrix: Any, bits: int, in_panels: bool) -> Panels | Rounded:
    """A matrix in any form, rounded; of shapes, shapes that lie as it does."""

    def of(matrix: Any) -> Rounded:
        if isinstance(matrix, Panels | Rounded):
            matrix = matrix.matrix()
        return Rounded.of(matrix, bits)

    shape = matrix.values if isinstance(matrix, Rounded) else matrix
    if not isinstance(shape, jax.ShapeDtypeStruct):
        return Panels.pack(of(matrix)) if in_panels else of(matrix)
    shapes = jax.eval_shape(of, matrix)
    if shape.sharding is None:
        return shapes
    return placed(shapes, shape.sharding, lambda leaf, sharding: leaf.update(sharding=sharding))


def _transposed(table: Table | Array | jax.ShapeDtypeStruct) -> Array | jax.ShapeDtypeStruct:
    """A table as the matrix of the output layer."""
    if not isinstance(table, jax.ShapeDtypeStruct):
        return (table.whole() if isinstance(table, Table) else table).T
    sharding = table.sharding and _transposed_sharding(table.sharding)
    return jax.eval_shape(jnp.transpose, table).update(sharding=sharding)


def _transposed_sharding(sharding: jax.NamedSharding) -> jax.NamedSharding:
    """Of a transposed matrix."""
    rows, columns = (*sharding.spec, None, None)[:2]
    return jax.NamedSharding(sharding.mesh, jax.P(columns, rows))


def _in_panels(values: np.ndarray) -> np.ndarray:
    """``[rows, columns]`` as ``[panels, rows, PANEL]``, the last one filled up with zeros."""
    rows, columns = values.shape
    panels = np.zeros((-(-columns // cpu_kernels.PANEL), rows, cpu_kernels.PANEL), values.dtype)
    for i, panel in enumerate(panels):
        part = values[:, i * cpu_kernels.PANEL : (i + 1) * cpu_kernels.PANEL]
        panel[:, : part.shape[1]] = part
    return panels


def _joined(panels: Array) -> Array:
    """What ``_in_panels`` was given, with what filled it up."""
    return jnp.swapaxes(panels, 0, 1).reshape(panels.shape[1], -1)


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


def _map_by_path(tree: PyTree, function) -> PyTree:
    flat = flatten_dict(tree)
    return unflatten_dict({path: function(path, leaf) for path, leaf in flat.items()})
