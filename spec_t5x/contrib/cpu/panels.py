"""Weights packed for the kernels: matrices in panels, embeddings in bfloat16 or float32.

A panel is 64 columns of a matrix, stored row after row, so that kernels read memory sequentially. A
matrix whose values are all representable in bfloat16, or as int8 times a power of two for each
column, as in a checkpoint stored so, is stored in that form and widened in registers. Products are
bit for bit those of the float32 matrix.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jaxtyping import UInt16

from spec_t5x.contrib.cpu import calls
from spec_t5x.models.weights import TABLES, Form, Rounded, powers_of_two
from spec_t5x.types import Array, Float, Float32, Int, Integer, PyTree

# Number of values that ``_narrow`` tests at a time.
_PART = 1 << 18


@flax.struct.dataclass
class Panels(Form):
    """Matrix ``[inner, features]`` in panels of 64 columns, the last padded by zeros."""

    # float32, bfloat16 or int8; or uint8 with two int4 weights: the low four bits are column c of
    # the panel, the high four bits column c + 32.
    panels: Float[Array, "panels inner columns"] | Integer[Array, "panels inner columns"]
    # Scales of rounded weights, padded like the panels; None for float32 and bfloat16.
    scales: Float[Array, "panels groups width"] | None
    features: int = flax.struct.field(pytree_node=False)
    # Number of tokens of each row to multiply; None for all.
    num: Int[Array, ""] | None = None

    @classmethod
    def pack(cls, matrix: Float32[Array, "inner features"] | Rounded) -> "Panels":
        """Packs a matrix on the host: a float32 one in int8 or bfloat16 if that is exact."""
        if isinstance(matrix, Rounded):
            values = np.asarray(matrix.values)
            scales = np.asarray(matrix.scales)
        else:
            values, scales = _in_bytes(matrix) or (_narrow(matrix), None)
        if scales is not None:
            scales = jnp.asarray(_in_panels(scales))
        is_int4 = values.dtype == jnp.int4
        panels = _in_panels(values.astype(np.int8) if is_int4 else values)
        if is_int4:
            first, second = np.split(panels.view(np.uint8), 2, axis=2)
            panels = np.bitwise_and(first, 15) | np.left_shift(second, 4)
        return cls(jnp.asarray(panels), scales, values.shape[1])

    def matrix(self) -> Float32[Array, "inner features"]:
        """Returns the packed matrix in float32."""
        panels, is_int4 = self.panels, self.panels.dtype == jnp.uint8
        if is_int4:
            halves = jnp.stack([panels << 4, panels], axis=2).astype(jnp.int8) >> 4
            panels = halves.reshape(*panels.shape[:2], -1)
        values = _joined(panels)[:, : self.features]
        if self.scales is None:
            return values.astype(jnp.float32)
        scales = _joined(self.scales)[:, : self.features]
        return Rounded(values.astype(jnp.int4) if is_int4 else values, scales).matrix()

    unpacked = matrix

    def for_kernels(self, bias: Float32[Array, "features"] | None = None) -> calls.Matrix:
        """Returns the kernels' argument for this matrix and a bias that they add."""
        return calls.Matrix(self.panels, self.scales, self.features, bias, self.num)

    def times(self, inputs: Float32[Array, "*rows inner"]) -> Float32[Array, "*rows features"]:
        """Computes ``inputs @ matrix``."""
        return calls.multiply(inputs, [self.for_kernels()])[0]

    def rounded(self, bits: int) -> "Panels":
        """Returns the matrix rounded to ``bits`` bits (8 or 4), in panels."""
        return Panels.pack(Rounded.of(self.matrix(), bits))


@flax.struct.dataclass
class PackedEmbedding(Form):
    """Table of embeddings, stored as the bits of bfloat16 if that is exact, else as float32.

    The bits are uint16.
    """

    values: UInt16[Array, "vocab embed"] | Float32[Array, "vocab embed"]
    # Number of tokens of each row to multiply; None for all.
    num: Int[Array, ""] | None = None

    @classmethod
    def pack(cls, table: Float32[Array, "vocab embed"]) -> "PackedEmbedding":
        """Packs a float32 table on the host, in bfloat16 if that is exact."""
        values = _narrow(table)
        is_wide = values.dtype == np.float32
        return cls(jnp.asarray(table if is_wide else values.view(np.uint16)))

    def rows(self, tokens: Int[Array, "*shape"]) -> Float32[Array, "*shape embed"]:
        """Returns the embeddings of tokens."""
        return calls.look_up(tokens, self.values)

    def scores(self, states: Float32[Array, "*rows embed"]) -> Float32[Array, "*rows vocab"]:
        """Computes ``states @ table.T``."""
        return calls.dot_with_table(states, self.values, self.num)

    def output_layer(self, bits: int) -> Panels:
        """Returns the transposed table rounded to ``bits`` bits (8 or 4), as the output layer."""
        return Panels.pack(Rounded.of(self.unpacked().T, bits))

    def unpacked(self) -> Float32[Array, "vocab embed"]:
        """Returns the whole table in float32."""
        if self.values.dtype == jnp.float32:
            return self.values
        return lax.bitcast_convert_type(self.values.astype(jnp.uint32) << 16, jnp.float32)


def pack(params: PyTree) -> PyTree:
    """Packs matrices and embeddings of a float32 tree with T5X's names; keeps other leaves."""
    flat = flatten_dict(params)
    return unflatten_dict({path: packed(path[-1], leaf) for path, leaf in flat.items()})


def packed(name: str, leaf: Float32[Array, "..."] | Form) -> Any:
    """Packs a parameter whose path ends with ``name``: a 'kernel' (matrix) or an embedding."""
    if isinstance(leaf, Form):
        return leaf
    if name == "kernel":
        return Panels.pack(leaf)
    leaf = jnp.asarray(leaf)
    return PackedEmbedding.pack(leaf) if name in TABLES else leaf


def is_packed(params: PyTree) -> bool:
    """Returns True if any leaf of the tree is a ``Panels``."""
    return any(isinstance(leaf, Panels) for leaf in flatten_dict(params).values())


def first(tree: PyTree, num: Int[Array, ""]) -> PyTree:
    """Returns the weights or model with products limited to the first ``num`` tokens of a row."""
    return jax.tree.map(
        lambda leaf: leaf.replace(num=num) if isinstance(leaf, Panels | PackedEmbedding) else leaf,
        tree,
        is_leaf=lambda node: isinstance(node, Panels | PackedEmbedding),
    )


def _in_panels(values: np.ndarray) -> np.ndarray:
    """Splits ``[rows, columns]`` into ``[panels, rows, PANEL]``, the last padded by zeros."""
    rows, columns = values.shape
    panels = np.zeros((-(-columns // calls.PANEL), rows, calls.PANEL), values.dtype)
    for i, panel in enumerate(panels):
        part = values[:, i * calls.PANEL : (i + 1) * calls.PANEL]
        panel[:, : part.shape[1]] = part
    return panels


def _joined(panels: Array) -> Array:
    """Returns ``[rows, columns]`` of panels, padding included; the inverse of ``_in_panels``."""
    return jnp.swapaxes(panels, 0, 1).reshape(panels.shape[1], -1)


def _in_bytes(matrix: Float32[Array, "rows columns"]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns int8 values and powers of two by column if they are the matrix, else None."""
    matrix = np.asarray(matrix)
    for columns in (slice(0, calls.PANEL), slice(None)):
        part = matrix[:, columns]
        scales = powers_of_two(part, axis=0)
        values = np.rint(part / scales)
        if not np.array_equal(values * scales, part):
            return None
    return values.astype(np.int8), scales


def _narrow(values: Float32[Array, "rows columns"]) -> np.ndarray:
    """Returns the values in bfloat16 if it holds all of them exactly, else unchanged."""
    values = np.ascontiguousarray(values)
    # bfloat16 is the upper half of a float32.
    halves = values.view(np.uint32)
    parts = np.array_split(halves, 1 + halves.size // _PART)
    if any(np.bitwise_and(part, 0xFFFF).any() for part in parts):
        return values
    return np.right_shift(halves, 16).astype(np.uint16).view(jnp.bfloat16)
