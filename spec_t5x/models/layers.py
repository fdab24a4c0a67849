"""Dense, embedding, norms and feed-forward: T5's layers, and GPT-2's and Gemma's variants.

Parameter names and logical axes are those of T5X's ``examples/t5``, so that its
checkpoints restore without a map and its partitioning rules apply.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.machine.accelerators import is_old_gpu
from spec_t5x.models.logical_axes import constrain, param_with_axes
from spec_t5x.models.weights import Form, rows
from spec_t5x.types import Array, Float, Float32, Int

fan_in_normal = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
_ZEROS = nn.initializers.zeros
fan_in_truncated = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

# Activations of feed-forward layers, by T5X's names.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "linear": lambda inputs: inputs,
    **{name: getattr(nn, name) for name in ("relu", "gelu", "silu", "swish", "tanh", "sigmoid")},
}


class Dense(nn.Module):
    """Linear map on the last axis: ``kernel [inputs, features]``; T5's has no bias."""

    features: int
    kernel_axes: tuple[str, str]
    dtype: str = "float32"
    kernel_init: Callable[..., Array] = fan_in_truncated
    use_bias: bool = False

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows inputs"]) -> Float[Array, "*rows features"]:
        shape = inputs.shape[-1], self.features
        kernel = param_with_axes(self, "kernel", self.kernel_init, shape, self.kernel_axes)
        kernel = kernel.unpacked() if getattr(kernel, "is_for_kernels", False) else kernel
        if isinstance(kernel, Form):
            outputs = kernel.times(inputs.astype(self.dtype))
        elif self.dtype == "float32":
            outputs = _float32_product(inputs, kernel)
        else:
            outputs = _product(inputs.astype(self.dtype), kernel.astype(self.dtype))
        if not self.use_bias:
            return outputs
        bias = param_with_axes(self, "bias", _ZEROS, shape[1:], self.kernel_axes[1:])
        return outputs + _along_last_axis(bias.astype(self.dtype), outputs.ndim)


class Embed(nn.Module):
    """Token embedding, which T5 1.0 and Gemma also use as their output layer."""

    num_embeddings: int
    features: int
    dtype: str = "float32"
    # Factors by which embeddings and, as the output layer, logits are multiplied.
    input_scale: float = 1.0
    output_scale: float = 1.0

    def setup(self):
        shape, init = (self.num_embeddings, self.features), nn.initializers.normal(stddev=1.0)
        self.embedding = param_with_axes(self, "embedding", init, shape, ("vocab", "embed"))

    def __call__(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length embed"]:
        embedded = rows(self.embedding, tokens).astype(self.dtype)
        if self.input_scale != 1:
            embedded = embedded * jnp.asarray(self.input_scale, self.dtype)
        return constrain(embedded, ("batch", "length", "embed"))

    def attend(
        self, states: Float[Array, "batch length embed"]
    ) -> Float32[Array, "batch length vocab"]:
        """Returns the float32 logits of all tokens, as the output layer."""
        if states.dtype == jnp.bfloat16:
            # A rescaled state would be rounded to bfloat16 once more, in float32 by a TPU or GPU.
            return times_table(states, self.embedding) * self.output_scale
        # Rescaling states instead of logits gives the same and multiplies fewer numbers.
        return times_table(states.astype(jnp.float32) * self.output_scale, self.embedding)


def times_table(
    states: Float[Array, "*rows embed"], table: Float[Array, "vocab embed"] | Form
) -> Float32[Array, "*rows vocab"]:
    """Returns ``states @ table.T`` in float32: logits by a table of embeddings."""
    if isinstance(table, Form):
        return table.scores(states)
    states, table = _for_float32(states, table)
    # JAX 0.7 multiplies bfloat16 on a CPU only if both factors are matrices.
    as_rows = states.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    rows = states.reshape(-1, states.shape[-1]) if as_rows else states
    contract_last = (((rows.ndim - 1,), (1,)), ((), ()))
    logits = lax.dot_general(rows, table, contract_last, preferred_element_type=jnp.float32)
    return logits.reshape(*states.shape[:-1], -1)


def _for_float32(
    inputs: Float[Array, "..."], weights: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns the factors of a float32 product in float32, or as they are if both are bfloat16.

    The product of two bfloat16 numbers is exact in float32, and a widened table would be a copy
    of twice the size.
    """
    if inputs.dtype == weights.dtype == jnp.bfloat16:
        return inputs, weights
    return inputs.astype(jnp.float32), weights.astype(jnp.float32)


class RMSNorm(nn.Module):
    """T5's layer norm, without mean and bias; its statistics are computed in float32."""

    epsilon: float = 1e-6
    dtype: str = "float32"
    # Whether the mean is subtracted first and a bias added, as in GPT-2.
    centred: ClassVar[bool] = False
    # Number that is added to the stored scale, as in Gemma.
    offset: ClassVar[float] = 0.0

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows embed"]) -> Float[Array, "*rows embed"]:
        shape, init = inputs.shape[-1:], nn.initializers.constant(1 - self.offset)
        scale = param_with_axes(self, "scale", init, shape, ("embed",))
        inputs = inputs.astype(jnp.float32)
        if self.centred:
            inputs = inputs - _mean(inputs)
        normed = inputs * lax.rsqrt(_mean(lax.square(inputs)) + self.epsilon)
        if self.offset:
            scale = scale.astype(jnp.float32) + self.offset
            return (normed * _along_last_axis(scale, inputs.ndim)).astype(self.dtype)
        scale = _along_last_axis(scale.astype(self.dtype), inputs.ndim)
        normed = normed.astype(self.dtype) * scale
        if not self.centred:
            return normed
        bias = param_with_axes(self, "bias", _ZEROS, shape, ("embed",))
        return normed + _along_last_axis(bias.astype(self.dtype), inputs.ndim)


class GemmaNorm(RMSNorm):
    """Gemma's RMS norm, which multiplies by 1 + ``scale``, in float32 for any ``dtype``."""

    offset: ClassVar[float] = 1.0


def _mean(values: Float32[Array, "*rows embed"]) -> Float32[Array, "*rows 1"]:
    if jax.default_backend() != "cpu":
        return jnp.mean(values, axis=-1, keepdims=True)
    # A product with a vector of 1 / embed: XLA's CPU backend splits a mean into three small
    # reductions, which cost more than the rest of a norm. The precision is for programs that
    # this host compiles for TPUs, which would otherwise multiply in bfloat16.
    weights = jnp.full((values.shape[-1], 1), 1 / values.shape[-1], jnp.float32)
    return jnp.matmul(values, weights, precision=lax.Precision.HIGHEST)


class Mlp(nn.Module):
    """Feed-forward block: the product of activated input maps (gated GELU has two), then ``wo``."""

    mlp_dim: int
    activations: tuple[str, ...] = ("relu",)
    dropout_rate: float = 0.0
    dtype: str = "float32"
    use_bias: bool = False

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "batch length embed"], deterministic: bool = True
    ) -> Float[Array, "batch length embed"]:
        maps = [self._dense(self.mlp_dim, ("embed", "mlp"), name) for name in self.map_names]
        hidden = activated(self.activations, (dense(inputs) for dense in maps))
        hidden = dropout(self.dropout_rate)(hidden, deterministic=deterministic)
        hidden = constrain(hidden, ("batch", "length", "mlp"))
        return self._dense(inputs.shape[-1], ("mlp", "embed"), "wo")(hidden)

    @property
    def map_names(self) -> list[str]:
        """Parameter names of the input maps, one for each activation."""
        count = len(self.activations)
        return ["wi"] if count == 1 else [f"wi_{index}" for index in range(count)]

    def _dense(self, features: int, axes: tuple[str, str], name: str) -> Dense:
        return Dense(features, axes, self.dtype, use_bias=self.use_bias, name=name)


def activated(activations: Sequence[str], branches: Iterable[Array]) -> Array:
    """Returns the product of the branches, each after the activation of its name."""
    named = zip(activations, branches, strict=True)
    return functools.reduce(operator.mul, (ACTIVATIONS[name](branch) for name, branch in named))


def dropout(rate: float) -> nn.Dropout:
    """Returns T5's dropout layer, whose mask is the same at all positions of a row."""
    return nn.Dropout(rate, broadcast_dims=(-2,))


def _float32_product(
    inputs: Float[Array, "*rows inner"], matrix: Float[Array, "inner features"]
) -> Float32[Array, "*rows features"]:
    """Returns ``inputs @ matrix`` in float32; on a GPU before Ampere, apart from other products.

    XLA for GPUs merges products of the same rows into one with a matrix of all columns. Without
    Triton, which has no code for these GPUs, it writes such matrices to memory in each call.
    """
    inputs, matrix = _for_float32(inputs, matrix)
    if is_old_gpu(jax.devices()[0]) and not _becomes_sums(inputs, matrix):
        inputs, matrix = lax.optimization_barrier((inputs, matrix))
    return jnp.dot(inputs, matrix, preferred_element_type=jnp.float32)


def _becomes_sums(
    inputs: Float[Array, "*rows inner"], matrix: Float[Array, "inner features"]
) -> bool:
    """Tells whether XLA for GPUs computes a product as sums of products, which it may write."""
    return math.prod(inputs.shape[:-1]) == 1 and matrix.size < 10**7


def _product(
    inputs: Float[Array, "*rows inner"], matrix: Float[Array, "inner features"]
) -> Float[Array, "*rows features"]:
    """Returns ``inputs @ matrix``; on a GPU, one bfloat16 row becomes eight.

    Where a product of one row becomes sums, XLA mostly writes the bfloat16 products to memory: as
    many bytes as the matrix has.
    """
    is_written = inputs.dtype == jnp.bfloat16 and _becomes_sums(inputs, matrix)
    if not is_written or jax.default_backend() != "gpu":
        return jnp.dot(inputs, matrix)
    repeated = jnp.broadcast_to(inputs.reshape(1, -1), (8, inputs.shape[-1]))
    return jnp.dot(repeated, matrix)[0].reshape(*inputs.shape[:-1], -1)


def _along_last_axis(vector: Float[Array, "features"], rank: int) -> Array:
    """Adds leading axes, since the tests forbid implicit promotion of ranks."""
    return vector.reshape((1,) * (rank - 1) + (-1,))
