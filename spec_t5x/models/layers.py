"""The layers of T5: dense, embedding, RMS norm, feed-forward.

Parameter names and logical axes are those of T5X's ``examples/t5``, so that its
checkpoints restore without a map and its partitioning rules apply.
"""

import functools
import operator
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax import lax

from spec_t5x.models.logical_axes import constrain, param_with_axes
from spec_t5x.types import Array, Float, Float32, Int

Initializer = Callable[..., Array]

fan_in_normal = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
fan_in_truncated = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


class Dense(nn.Module):
    """A linear map without bias on the last axis; ``kernel [inputs, features]``."""

    features: int
    kernel_axes: tuple[str, str]
    dtype: str = "float32"
    kernel_init: Initializer = fan_in_truncated

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows inputs"]) -> Float[Array, "*rows features"]:
        kernel = param_with_axes(
            "kernel",
            self.kernel_init,
            (inputs.shape[-1], self.features),
            jnp.float32,
            axes=self.kernel_axes,
        )
        return jnp.dot(inputs.astype(self.dtype), kernel.astype(self.dtype))


class Embed(nn.Module):
    """Token embedding, which T5 1.0 also uses as its output layer."""

    num_embeddings: int
    features: int
    dtype: str = "float32"

    def setup(self):
        self.embedding = param_with_axes(
            "embedding",
            nn.initializers.normal(stddev=1.0),
            (self.num_embeddings, self.features),
            jnp.float32,
            axes=("vocab", "embed"),
        )

    def __call__(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length embed"]:
        embedded = jnp.take(self.embedding, tokens, axis=0).astype(self.dtype)
        return constrain(embedded, ("batch", "length", "embed"))

    def attend(
        self, states: Float[Array, "batch length embed"]
    ) -> Float32[Array, "batch length vocab"]:
        """Scores of every token, in float32, rescaled by ``embed ** -0.5`` (T5 1.0)."""
        # Rescaling the states is the same map as rescaling the logits and touches
        # fewer numbers.
        states = states.astype(jnp.float32) * self.features**-0.5
        contract_last = (((states.ndim - 1,), (1,)), ((), ()))
        return lax.dot_general(states, self.embedding.astype(jnp.float32), contract_last)


class RMSNorm(nn.Module):
    """T5's layer norm: no mean, no bias; statistics in float32."""

    epsilon: float = 1e-6
    dtype: str = "float32"

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows embed"]) -> Float[Array, "*rows embed"]:
        scale = param_with_axes(
            "scale", nn.initializers.ones, (inputs.shape[-1],), jnp.float32, axes=("embed",)
        )
        inputs = inputs.astype(jnp.float32)
        # A product with a vector of 1 / embed: XLA's CPU backend splits a mean into
        # three small reductions, which costs more than all else in this layer. In full
        # precision, since a TPU would otherwise multiply in bfloat16.
        weights = jnp.full((inputs.shape[-1], 1), 1 / inputs.shape[-1], jnp.float32)
        mean_square = jnp.matmul(lax.square(inputs), weights, precision=lax.Precision.HIGHEST)
        normed = inputs * lax.rsqrt(mean_square + self.epsilon)
        # The rank is spelt out: strict rank promotion is an error in the tests.
        scale = scale.astype(self.dtype).reshape((1,) * (inputs.ndim - 1) + (-1,))
        return normed.astype(self.dtype) * scale


class Mlp(nn.Module):
    """Feed-forward block; several activations multiply (gated GELU is two)."""

    mlp_dim: int
    activations: tuple[str, ...] = ("relu",)
    dropout_rate: float = 0.0
    dtype: str = "float32"

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "batch length embed"], deterministic: bool = True
    ) -> Float[Array, "batch length embed"]:
        branches = []
        for index, activation in enumerate(self.activations):
            name = "wi" if len(self.activations) == 1 else f"wi_{index}"
            branch = Dense(self.mlp_dim, ("embed", "mlp"), self.dtype, name=name)(inputs)
            branches.append(_activation(activation)(branch))
        hidden = functools.reduce(operator.mul, branches)
        hidden = dropout(self.dropout_rate)(hidden, deterministic=deterministic)
        hidden = constrain(hidden, ("batch", "length", "mlp"))
        return Dense(inputs.shape[-1], ("mlp", "embed"), self.dtype, name="wo")(hidden)


def dropout(rate: float) -> nn.Dropout:
    """T5's dropout: one mask for all positions of a row."""
    return nn.Dropout(rate, broadcast_dims=(-2,))


def _activation(name: str) -> Callable[[Array], Array]:
    return (lambda x: x) if name == "linear" else getattr(nn, name)
