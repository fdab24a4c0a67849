"""Forms of parameters: arrays, or objects that compute the products with a parameter.

A decoder step reads every matrix once, so its time grows with the bytes of the matrices. A matrix
in int8 or int4 takes a half or a quarter of the bytes of bfloat16; rounding changes the model.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from spec_t5x.names import INT4, INT8
from spec_t5x.types import Array, Float, Float32, Int, Integer, PyTree

# Names of embedding parameters, which are read row by row.
TABLES = ("embedding", "token_embedding")
# Name of an encoder's separate embedding, which is not the output layer.
_OF_SOURCES = "source_embedder"

# Bits of rounded weights, by their names in options.
BITS = {INT8: 8, INT4: 4}
# Number of rows of a column that share a scale in int4; in int8 all rows do.
GROUP = 64


class Form:
    """Base class of parameters that are not arrays, with the products that networks compute.

    A matrix ``[inner, features]`` has ``times(inputs)`` and ``rounded(bits)``. A table of
    embeddings ``[vocab, embed]`` has ``rows(tokens)`` and ``scores(states)`` (float32 logits) and,
    if it can be rounded, ``output_layer(bits)``, which returns a rounded matrix.
    """

    # True if only kernels can read the form; XLA multiplies with ``unpacked()``.
    is_for_kernels: ClassVar[bool] = False

    def unpacked(self) -> "Array | Form":
        """Returns the parameter as it was before packing, by default itself."""
        return self


@flax.struct.dataclass
class Rounded(Form):
    """Matrix ``[inner, features]`` in int8 or int4, with a scale for each group of a column."""

    values: Integer[Array, "inner features"] | jax.ShapeDtypeStruct
    scales: Float32[Array, "groups features"] | jax.ShapeDtypeStruct

    @classmethod
    def of(cls, matrix: Float[Array, "inner features"], bits: int = 8) -> "Rounded":
        """Rounds a matrix so that the largest magnitude in each group becomes 127, in 4 bits 7.

        A group is a column in 8 bits, ``GROUP`` rows of one in 4 bits (the last may have fewer).
        """
        inner, features = matrix.shape
        group = inner if bits == 8 else GROUP
        padded = jnp.pad(matrix.astype(jnp.float32), ((0, -inner % group), (0, 0)))
        grouped = padded.reshape(-1, group, features)
        largest = jnp.max(jnp.abs(grouped), axis=1)
        scales = jnp.where(largest > 0, largest, 1.0) / (2 ** (bits - 1) - 1)
        # Scales of 12 bits have exact products with the values, so that rounding is idempotent.
        scales = lax.reduce_precision(scales, exponent_bits=8, mantissa_bits=11)
        values = jnp.round(grouped / scales[:, None]).reshape(padded.shape)[:inner]
        return cls(values.astype(jnp.int8 if bits == 8 else jnp.int4), scales)

    def matrix(self) -> Float32[Array, "inner features"]:
        """Returns the values times their scales, in float32."""
        inner = self.values.shape[0]
        group = GROUP if self.values.dtype == jnp.int4 else inner
        return self.values.astype(jnp.float32) * jnp.repeat(self.scales, group, axis=0)[:inner]

    def times(self, inputs: Float[Array, "*rows inner"]) -> Float[Array, "*rows features"]:
        """Returns ``inputs @ matrix`` in the inputs' type."""
        if self.values.dtype == jnp.int4:
            return jnp.dot(inputs, self.matrix().astype(inputs.dtype))
        product = jnp.dot(
            inputs, self.values.astype(inputs.dtype), preferred_element_type=jnp.float32
        )
        scales = self.scales.reshape((1,) * (inputs.ndim - 1) + (-1,))
        return (product * scales).astype(inputs.dtype)

    def rounded(self, bits: int) -> "Rounded":
        """Returns the matrix rounded again; shapes in place of arrays give shapes."""
        return _rounded(self, bits)


def powers_of_two(matrix: np.ndarray, axis: int) -> np.ndarray:
    """Returns for each row or column the least power by which it is at most 127; keeps ``axis``."""
    # frexp: largest / 127 = fraction * 2 ** exponent, 0.5 <= fraction < 1.
    fraction, exponents = np.frexp(np.abs(matrix).max(axis, keepdims=True) / np.float32(127))
    return np.ldexp(np.float32(1), exponents - (fraction == 0.5))


@flax.struct.dataclass
class TiedTable(Form):
    """Tied embeddings: the exact table for look-up, and the rounded output layer."""

    table: Form | Array | jax.ShapeDtypeStruct
    output: Form  # [embed, vocab]

    def rows(self, tokens: Int[Array, "*shape"]) -> Float[Array, "*shape embed"]:
        """Returns the tokens' embeddings, which are not rounded."""
        return rows(self.table, tokens)

    def scores(self, states: Float[Array, "*rows embed"]) -> Float32[Array, "*rows vocab"]:
        """Returns the float32 logits by the rounded output layer."""
        return self.output.times(states.astype(jnp.float32))

    def unpacked(self) -> Array | Form:
        """Returns the exact embeddings, unpacked."""
        return self.table.unpacked() if isinstance(self.table, Form) else self.table


def rows(table: Form | Array, tokens: Int[Array, "*shape"]) -> Float[Array, "*shape embed"]:
    """Returns the tokens' embeddings in a table of any form."""
    return table.rows(tokens) if isinstance(table, Form) else jnp.take(table, tokens, axis=0)


def map_forms(function: Callable[[Form], Any], tree: PyTree) -> PyTree:
    """Returns a tree (parameters or a model) with ``function`` applied to each ``Form`` in it."""
    return jax.tree.map(
        lambda leaf: function(leaf) if isinstance(leaf, Form) else leaf,
        tree,
        is_leaf=lambda node: isinstance(node, Form),
    )


def rounded(weights: PyTree, bits: int = 8, *, tied: bool) -> PyTree:
    """Returns a model's weights with each matrix in 8 or 4 bits; shapes give rounded shapes.

    Embeddings that are ``tied`` to the output layer become a ``TiedTable``; others stay exact.
    """
    flat = flatten_dict(weights)
    return unflatten_dict(
        {path: rounded_weight(path, leaf, bits, tied=tied) for path, leaf in flat.items()}
    )


def rounded_weight(path: Sequence[str], weight: Any, bits: int, *, tied: bool) -> Any:
    """Returns one of a model's weights as ``rounded`` does; ``path`` are the names above it."""
    if path[-1] == "kernel":
        return weight.rounded(bits) if isinstance(weight, Form) else _rounded(weight, bits)
    if not (tied and path[-1] in TABLES) or path[0] == _OF_SOURCES:
        return weight
    table = weight.table if isinstance(weight, TiedTable) else weight
    return TiedTable(table, _output_layer(table, bits))


def placed(
    weight: TiedTable | Rounded | Array,
    sharding: jax.NamedSharding,
    place: Callable[[Array | jax.ShapeDtypeStruct, jax.NamedSharding], Any],
) -> Any:
    """Returns a weight whose arrays, or shapes, are results of ``place(array, sharding)``.

    Rounded values have the parameter's ``sharding``, a tied output layer the transposed one;
    scales are replicated on every device.
    """
    if isinstance(weight, TiedTable):
        output = placed(weight.output, _transposed_sharding(sharding), place)
        return TiedTable(place(weight.table, sharding), output)
    if isinstance(weight, Rounded):
        everywhere = jax.NamedSharding(sharding.mesh, jax.P())
        return Rounded(place(weight.values, sharding), place(weight.scales, everywhere))
    return place(weight, sharding)


def _rounded(matrix: Any, bits: int) -> Rounded:
    """Rounds a matrix; if given as a shape, returns shapes, with the same sharding."""

    def of(matrix: Any) -> Rounded:
        return Rounded.of(matrix.matrix() if isinstance(matrix, Rounded) else matrix, bits)

    shape = matrix.values if isinstance(matrix, Rounded) else matrix
    if not isinstance(shape, jax.ShapeDtypeStruct):
        return of(matrix)
    shapes = jax.eval_shape(of, matrix)
    if shape.sharding is None:
        return shapes
    return placed(shapes, shape.sharding, lambda leaf, sharding: leaf.update(sharding=sharding))


def _output_layer(table: Form | Array | jax.ShapeDtypeStruct, bits: int) -> Form:
    """Rounds a table's transpose, the output layer; if given as a shape, returns shapes."""
    if isinstance(table, Form):
        return table.output_layer(bits)
    if not isinstance(table, jax.ShapeDtypeStruct):
        return _rounded(table.T, bits)
    sharding = table.sharding and _transposed_sharding(table.sharding)
    return _rounded(jax.eval_shape(jnp.transpose, table).update(sharding=sharding), bits)


def _transposed_sharding(sharding: jax.NamedSharding) -> jax.NamedSharding:
    rows, columns = (*sharding.spec, None, None)[:2]
    return jax.NamedSharding(sharding.mesh, jax.P(columns, rows))
