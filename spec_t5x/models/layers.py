"""The layers: dense, embedding, norms, feed-forward; T5's, and the variants of GPT-2 and Gemma.

Parameter names and logical axes are those of T5X's ``examples/t5``, so that its
checkpoints restore without a map and its partitioning rules apply.
"""

import functools
import operator
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.models.logical_axes import constrain, param_with_axes
from spec_t5x.models.weights import Form, rows
from spec_t5x.types import Array, Float, Float32, Int

Initializer = Callable[..., Array]

fan_in_normal = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
fan_in_truncated = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

# Of the feed-forward layers, by T5X's names.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "linear": lambda inputs: inputs,
    **{name: getattr(nn, name) for name in ("relu", "gelu", "silu", "swish", "tanh", "sigmoid")},
}


class Dense(nn.Module):
    """A linear map on the last axis; ``kernel [inputs, features]``, T5's without a bias."""

    features: int
    kernel_axes: tuple[str, str]
    dtype: str = "float32"
    kernel_init: Initializer = fan_in_truncated
    use_bias: bool = False

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows inputs"]) -> Float[Array, "*rows features"]:
        shape, init = (inputs.shape[-1], self.features), self.kernel_init
        kernel = param_with_axes(self, "kernel", init, shape, jnp.float32, axes=self.kernel_axes)
        bias = None
        if self.use_bias:
            init, axes = nn.initializers.zeros, self.kernel_axes[1:]
            bias = param_with_axes(self, "bias", init, (self.features,), jnp.float32, axes=axes)
        if isinstance(kernel, Form):
            outputs = kernel.times(inputs.astype(self.dtype))
        elif self.dtype == "float32":
            outputs = jnp.dot(*_for_float32(inputs, kernel), preferred_element_type=jnp.float32)
        else:
            outputs = jnp.dot(inputs.astype(self.dtype), kernel.astype(self.dtype))
        if bias is None:
            return outputs
        return outputs + _along_last_axis(bias.astype(self.dtype), outputs.ndim)


class Embed(nn.Module):
    """Token embedding, which T5 1.0 and Gemma also use as their output layer."""

    num_embeddings: int
    features: int
    dtype: str = "float32"
    # What an embedding is multiplied by, and what its scores are.
    input_scale: float = 1.0
    output_scale: float = 1.0
    # The token whose embedding is a parameter of its own, where an image ends; 0 for none.
    image_end_id: int = 0

    def setup(self):
        shape, init = (self.num_embeddings, self.features), nn.initializers.normal(stddev=1.0)
        self.embedding = param_with_axes(
            self, "embedding", init, shape, jnp.float32, axes=("vocab", "embed")
        )
        if self.image_end_id:
            shape, init = shape[1:], nn.initializers.zeros
            self.image_end = param_with_axes(
                self, "image_end", init, shape, jnp.float32, axes=("embed",)
            )

    def __call__(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length embed"]:
        embedded = rows(self.embedding, tokens).astype(self.dtype)
        if self.input_scale != 1:
            embedded = embedded * jnp.asarray(self.input_scale, self.dtype)
        if self.image_end_id:
            is_end = (tokens == self.image_end_id)[..., None]
            image_end = _along_last_axis(self.image_end.astype(self.dtype), embedded.ndim)
            embedded = jnp.where(is_end, image_end, embedded)
        return constrain(embedded, ("batch", "length", "embed"))

    def attend(
        self, states: Float[Array, "batch length embed"]
    ) -> Float32[Array, "batch length vocab"]:
        """Scores of every token, in float32."""
        scale = self.output_scale
        if scale == 1:
            return times_table(states, self.embedding)
        if states.dtype == getattr(self.embedding, "dtype", None) == jnp.bfloat16:
            # Which has no room for a rescaled state.
            return times_table(states, self.embedding) * scale
        # Rescaling the states is the same map and touches fewer numbers.
        return times_table(states.astype(jnp.float32) * scale, self.embedding)


def times_table(
    states: Float[Array, "*rows embed"], table: Float[Array, "vocab embed"] | Form
) -> Float32[Array, "*rows vocab"]:
    """``states @ table.T`` in float32: a table of embeddings as the output layer."""
    if isinstance(table, Form):
        return table.scores(states)
    states, table = _for_float32(states, table)
    # JAX 0.7 multiplies bfloat16 on a CPU as matrices, and not with more axes.
    as_rows = states.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    rows = states.reshape(-1, states.shape[-1]) if as_rows else states
    contract_last = (((rows.ndim - 1,), (1,)), ((), ()))
    logits = lax.dot_general(rows, table, contract_last, preferred_element_type=jnp.float32)
    return logits.reshape(*states.shape[:-1], -1)


def _for_float32(
    inputs: Float[Array, "..."], weights: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Both as they go into a product in float32.

    The product of two numbers in bfloat16 is a float32: such arrays stay as they are, and no
    table is copied in twice its size.
    """
    if inputs.dtype == weights.dtype == jnp.bfloat16:
        return inputs, weights
    return inputs.astype(jnp.float32), weights.astype(jnp.float32)


class RMSNorm(nn.Module):
    """T5's layer norm: no mean, no bias; statistics in float32."""

    epsilon: float = 1e-6
    dtype: str = "float32"
    # GPT-2's: less their mean first, and with a bias.
    centred: ClassVar[bool] = False
    # Gemma's: what is stored is the scale less this.
    offset: ClassVar[float] = 0.0

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows embed"]) -> Float[Array, "*rows embed"]:
        init = nn.initializers.constant(1 - self.offset)
        scale = self._vector("scale", init, inputs)
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
        bias = self._vector("bias", nn.initializers.zeros, inputs)
        return normed + _along_last_axis(bias.astype(self.dtype), inputs.ndim)

    def _vector(self, name: str, init: Initializer, inputs: Array) -> Float[Array, "embed"]:
        shape = (inputs.shape[-1],)
        return param_with_axes(self, name, init, shape, jnp.float32, axes=("embed",))


class LayerNorm(RMSNorm):
    """GPT-2's layer norm, with mean and bias; statistics in float32."""

    epsilon: float = 1e-5
    centred: ClassVar[bool] = True


class GemmaNorm(RMSNorm):
    """Gemma's RMS norm: its scale is one more than the parameter, and float32 in any type."""

    offset: ClassVar[float] = 1.0


def _mean(values: Float32[Array, "*rows embed"]) -> Float32[Array, "*rows 1"]:
    if jax.default_backend() != "cpu":
        return jnp.mean(values, axis=-1, keepdims=True)
    # A product with a vector of 1 / embed: XLA's CPU backend splits a mean into three small
    # reductions, which costs more than all else in a norm. In full precision, since a TPU
    # that is compiled for from here would otherwise multiply in bfloat16.
    weights = jnp.full((values.shape[-1], 1), 1 / values.shape[-1], jnp.float32)
    return jnp.matmul(values, weights, precision=lax.Precision.HIGHEST)


class Mlp(nn.Module):
    """Feed-forward block; several activations multiply (gated GELU is two)."""

    mlp_dim: int
    activations: tuple[str, ...] = ("relu",)
    dropout_rate: float = 0.0
    dtype: str = "float32"
    use_bias: bool = False

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "batch length embed"], deterministic: bool = True
    ) -> Float[Array, "batch length embed"]:
        count = len(self.activations)
        names = ["wi"] if count == 1 else [f"wi_{index}" for index in range(count)]
        maps = [self._dense(self.mlp_dim, ("embed", "mlp"), name) for name in names]
        branches = zip(self.activations, maps, strict=True)
        hidden = functools.reduce(
            operator.mul, (ACTIVATIONS[name](dense(inputs)) for name, dense in branches)
        )
        hidden = dropout(self.dropout_rate)(hidden, deterministic=deterministic)
        hidden = constrain(hidden, ("batch", "length", "mlp"))
        return self._dense(inputs.shape[-1], ("mlp", "embed"), "wo")(hidden)

    def _dense(self, features: int, axes: tuple[str, str], name: str) -> Dense:
        return Dense(features, axes, self.dtype, use_bias=self.use_bias, name=name)


def dropout(rate: float) -> nn.Dropout:
    """T5's dropout: one mask for all positions of a row."""
    return nn.Dropout(rate, broadcast_dims=(-2,))


def _along_last_axis(vector: Float[Array, "features"], rank: int) -> Array:
    """The vector with axes before it: strict rank promotion is an error in the tests."""
    return vector.reshape((1,) * (rank - 1) + (-1,))
