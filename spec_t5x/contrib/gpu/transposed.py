"""Weights as the kernels read them: matrices whose columns follow each other in memory.

A program of a kernel reads some columns. If a matrix is stored by rows, each row is another line of
memory, and the number of lines decides the time of a small product: some four cycles each on an
H100.
"""

from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.models import weights
from spec_t5x.models.weights import Form, Rounded
from spec_t5x.types import Array, Float, Float32, PyTree, Shaped


@flax.struct.dataclass
class Transposed(Form):
    """Matrix ``[inner, features]``, transposed: bfloat16, float32, or int8 with scales."""

    # XLA transposes without a copy.
    is_for_kernels: ClassVar[bool] = True

    values: Shaped[Array, "features inner"]
    scales: Float32[Array, "1 features"] | None = None

    @classmethod
    def of(cls, matrix: Float[Array, "inner features"] | Rounded) -> "Transposed":
        """Transposes a matrix; a rounded one must be in int8."""
        if isinstance(matrix, Rounded):
            return cls(jnp.transpose(matrix.values), matrix.scales)
        return cls(jnp.transpose(matrix))

    @property
    def shape(self) -> tuple[int, int]:
        """Sizes of the matrix before it was transposed."""
        return self.values.shape[::-1]

    def unpacked(self) -> Float[Array, "inner features"] | Rounded:
        """Returns the matrix as it was."""
        values = jnp.transpose(self.values)
        return values if self.scales is None else Rounded(values, self.scales)

    def times(self, inputs: Float[Array, "*rows inner"]) -> Float[Array, "*rows features"]:
        """Returns ``inputs @ matrix`` in the inputs' type, by XLA."""
        matrix = self.unpacked()
        if isinstance(matrix, Rounded):
            return matrix.times(inputs)
        return jnp.dot(inputs, matrix.astype(inputs.dtype))

    def rounded(self, bits: int) -> Form:
        """Returns the matrix in 8 bits, transposed, or in 4 bits, as XLA reads it."""
        matrix = {"kernel": self.unpacked()}
        return packed("kernel", weights.rounded(matrix, bits, tied=False)["kernel"])


def pack(params: PyTree) -> PyTree:
    """Transposes a tree's matrices that are arrays, or in int8; keeps other leaves."""
    flat = flatten_dict(params)
    return unflatten_dict({path: packed(path[-1], leaf) for path, leaf in flat.items()})


def packed(name: str, leaf: Any) -> Any:
    """Transposes a parameter whose path ends with ``name``, if it is a matrix ('kernel')."""
    is_int8 = isinstance(leaf, Rounded) and leaf.values.dtype == jnp.int8
    is_matrix = name == "kernel" and (is_int8 or not isinstance(leaf, Form))
    return Transposed.of(leaf) if is_matrix else leaf
