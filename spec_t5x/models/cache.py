"""The decoder's static KV cache: fixed shapes, one write position for each row.

Two properties make speculation possible:

* writes overwrite. Entries beyond a row's length may have any value, and the
  next write at these positions replaces them;
* a row's length is data, not shape. Rolling a row back by n tokens subtracts n
  from its length; keys and values are not changed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from spec_t5x.interfaces import Nodes
from spec_t5x.models.logical_axes import constrain
from spec_t5x.sampling.distributions import write_rows
from spec_t5x.types import Array, Bool, Float, Int, Integer

# Logical axes of a layer's keys and values.
AXES = ("batch", "heads", "length", "kv")


@flax.struct.dataclass
class RoundedHeads:
    """Keys or values of sources in int8, with a scale for each head and position."""

    values: Integer[Array, "inputs heads source head_dim"]
    scales: Float[Array, "inputs heads 1 source"]

    @classmethod
    def of(cls, heads: Float[Array, "inputs heads source head_dim"]) -> "RoundedHeads":
        """Rounds keys or values so that the largest magnitude of each scale becomes 127."""
        largest = jnp.max(jnp.abs(heads), axis=-1, keepdims=True)
        scales = jnp.where(largest == 0, 1, largest / 127).astype(heads.dtype)
        # A scale in bfloat16 may be too small by a rounding error.
        values = jnp.clip(jnp.round(heads.astype(jnp.float32) / scales), -127, 127)
        return cls(values.astype(jnp.int8), scales.swapaxes(2, 3))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.values.shape


@flax.struct.dataclass
class LayerCache:
    """Keys and values of one decoder layer."""

    keys: Float[Array, "batch heads length head_dim"]
    values: Float[Array, "batch heads length head_dim"]
    # Those of the source, computed once for an input and only read afterwards; None without one.
    cross_keys: Float[Array, "inputs heads source head_dim"] | RoundedHeads | None = None
    cross_values: Float[Array, "inputs heads source head_dim"] | RoundedHeads | None = None


@flax.struct.dataclass
class KVCache:
    """KV cache of a decoder for a batch.

    The first axis of texts' arrays is the batch, that of sources' arrays the inputs. The rows of
    an input (one, or ``num_decodes``) are consecutive in the batch.
    """

    layers: tuple[LayerCache, ...]
    # Number of decoder tokens, the start token included, that are cached for each row.
    lengths: Int[Array, "batch"]
    # True for tokens of the encoder's input, False for padding; None without a source.
    source_mask: Bool[Array, "inputs source"] | None = None

    @classmethod
    def empty(cls, config: Any, batch: int, max_length: int) -> "KVCache":
        """Returns an empty cache without a source: ``batch`` rows of ``max_length`` tokens."""
        empty = zeros(config, batch, max_length)
        layers = (LayerCache(empty, empty),) * config.num_decoder_layers
        return cls(layers, jnp.zeros(batch, jnp.int32))

    @property
    def max_length(self) -> int:
        """Number of positions that each row has room for."""
        return self.layers[0].keys.shape[2]

    def at(self, lengths: Int[Array, "batch"]) -> "KVCache":
        """Returns the cache with the rows' lengths set to ``lengths``; no array is copied."""
        return self.replace(lengths=lengths)

    def map(
        self, function: Callable[[Array], Any], names: Sequence[str] = ("keys", "values")
    ) -> "KVCache":
        """Returns the cache with a function applied to each layer's arrays of these names."""
        layers = (
            layer.replace(**{name: function(getattr(layer, name)) for name in names})
            for layer in self.layers
        )
        return self.replace(layers=tuple(layers))

    def through(self, layers, states: Array, *args) -> tuple[list[Array], "KVCache"]:
        """Runs new tokens through decoder layers; returns each layer's states, and the cache."""
        outputs, caches = [], []
        for layer, layer_cache in zip(layers, self.layers, strict=True):
            states, layer_cache = layer.extend(states, layer_cache, *args)
            outputs.append(states)
            caches.append(layer_cache)
        return outputs, self.replace(layers=tuple(caches))

    def repeat_rows(self, times: int) -> "KVCache":
        """Returns the cache with each row repeated ``times`` times; copies share the source."""
        repeated = self.map(lambda cached: jnp.repeat(cached, times, axis=0))
        return repeated.at(jnp.repeat(self.lengths, times))

    def laid_out(self) -> "KVCache":
        """Returns the cache in the layout that XLA for TPUs gives a target's, length along lanes.

        XLA would choose another layout for a loop over single tokens. If a draft writes to its
        target's cache, XLA would then copy the whole cache before the loop and after it.
        """

        def lay_out(array):
            return lax.platform_dependent(
                array,
                tpu=lambda array: with_layout_constraint(array, Layout((0, 1, 3, 2))),
                default=lambda array: array,
            )

        return self.map(lay_out)


def zeros(config: Any, batch: int, max_length: int) -> Float[Array, "batch heads length head_dim"]:
    """Returns zeros, the keys or values of a layer in an empty cache."""
    shape = batch, config.num_kv_heads, max_length, config.head_dim
    return constrain(jnp.zeros(shape, config.dtype), AXES)


def write(
    cached: Float[Array, "batch heads length head_dim"],
    new: Float[Array, "batch heads new head_dim"],
    places: Int[Array, "batch"] | Nodes,
) -> Float[Array, "batch heads length head_dim"]:
    """Returns ``cached`` with ``new[b]`` at the slots from ``places[b]`` on, or at the nodes'."""
    if isinstance(places, Nodes):
        if not places.consecutive:
            set_slots = jax.vmap(lambda row, update, at: row.at[:, at].set(update))
            return constrain(set_slots(cached, new, places.slots), AXES)
        places = places.slots[:, 0]
    return constrain(write_rows(cached, new, places, axis=2), AXES)
