"""The decoder's static cache: fixed shapes, one write position for each row.

Two properties make speculation possible and are relied on everywhere:

* writes overwrite. The cache never accumulates, so entries beyond a row's length
  may hold anything, and the next write at that position replaces them;
* a row's length is data, not shape. Rolling a row back by n tokens is subtracting
  n from its length; no array is touched.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from spec_t5x.interfaces import Nodes
from spec_t5x.loops.refill import Move
from spec_t5x.models.logical_axes import constrain
from spec_t5x.sampling.distributions import write_rows
from spec_t5x.types import Array, Bool, Float, Int

# What the axes of a layer's keys and values mean, for a mesh: the rows lie with the rest
# of the batch, the heads where their projections are.
AXES = ("batch", "heads", "length", "kv")


@flax.struct.dataclass
class KeysValues:
    """What self-attention of one decoder layer has cached, written as decoding goes on."""

    keys: Float[Array, "batch heads length head_dim"]
    values: Float[Array, "batch heads length head_dim"]

    def map(self, function: Callable[[Array], Array]) -> "KeysValues":
        """The same with a function applied to keys and values."""
        return self.replace(keys=function(self.keys), values=function(self.values))


@flax.struct.dataclass
class LayerCache(KeysValues):
    """Keys and values of one decoder layer that also attends to a source."""

    # Of cross-attention, computed once per input and only read afterwards.
    cross_keys: Float[Array, "inputs heads source head_dim"]
    cross_values: Float[Array, "inputs heads source head_dim"]


class Cache:
    """What a decoder remembers of a batch: ``layers``, and ``lengths`` of its rows."""

    @property
    def max_length(self) -> int:
        """Number of decoder positions there is room for."""
        return self.layers[0].keys.shape[2]

    def at(self, lengths: Int[Array, "batch"]) -> "Cache":
        """The same cache with each row cut back (rolled back) to ``lengths``."""
        return self.replace(lengths=lengths)

    def map(self, function: Callable[[Array], Array]) -> "Cache":
        """The same cache with a function applied to the keys and values of each layer."""
        return self.replace(layers=tuple(layer.map(function) for layer in self.layers))

    def through(self, layers, states: Array, *args) -> tuple[list[Array], "Cache"]:
        """New tokens' states after each of a decoder's layers, and the cache with them."""
        outputs, caches = [], []
        for layer, layer_cache in zip(layers, self.layers, strict=True):
            states, layer_cache = layer.extend(states, layer_cache, *args)
            outputs.append(states)
            caches.append(layer_cache)
        return outputs, self.replace(layers=tuple(caches))

    def move(self, slots: Int[Array, "batch nodes"], starts: Int[Array, "batch"]) -> "Cache":
        """The same cache, with the contents of ``slots`` copied to follow ``starts``."""
        return self.map(lambda cached: move(cached, slots, starts))

    def insert_rows(self, new: "Cache", move: Move) -> "Cache":
        """The cache with a row of another in it, which may have less room.

        What is beyond that stays, and is not looked at.
        """
        layers = jax.tree.map(move.beginning, self.layers, new.layers)
        return self.replace(layers=layers, lengths=move.beginning(self.lengths, new.lengths))

    def laid_out(self) -> "Cache":
        """The same cache in the layout that XLA for TPUs gives a target's, length along lanes.

        For a loop over single tokens it would choose another one: where a draft writes to
        its target's cache, all of it would be copied on the way in and on the way out.
        """

        def lay_out(array):
            return lax.platform_dependent(
                array,
                tpu=lambda array: with_layout_constraint(array, Layout((0, 1, 3, 2))),
                default=lambda array: array,
            )

        return self.map(lay_out)


@flax.struct.dataclass
class DecoderCache(Cache):
    """All that a decoder remembers of a batch and its sources.

    What is of the texts leads with the batch axis; what is of the sources is there once for
    each input, whose rows (one, or ``num_decodes``) follow one another in the batch.
    """

    layers: tuple[LayerCache, ...]
    # True where the encoder's input is a token, False where it is padding.
    source_mask: Bool[Array, "inputs source"]
    # How many decoder tokens, the start token included, are cached for each row.
    lengths: Int[Array, "batch"]

    def repeat_rows(self, times: int) -> "DecoderCache":
        """The cache of ``times`` rows of each row, which read the same sources."""
        repeated = self.map(lambda cached: jnp.repeat(cached, times, axis=0))
        return repeated.at(jnp.repeat(self.lengths, times))

    def insert_rows(self, new: "DecoderCache", move: Move) -> "DecoderCache":
        """The cache with an input of another in it, whose texts and sources may be shorter."""
        inserted = super().insert_rows(new, move)
        return inserted.replace(source_mask=move.whole(self.source_mask, new.source_mask))


@flax.struct.dataclass
class DecoderOnlyCache(Cache):
    """All that a decoder without a source remembers. Every leaf leads with the batch axis."""

    layers: tuple[KeysValues, ...]
    # How many tokens, the start token included, are cached for each row.
    lengths: Int[Array, "batch"]

    @classmethod
    def empty(cls, config: Any, layers: int, batch: int, max_length: int) -> "DecoderOnlyCache":
        """Room for ``max_length`` tokens in each of ``batch`` rows, for layers of ``config``."""
        shape = (batch, config.num_heads, max_length, config.head_dim)
        room = constrain(jnp.zeros(shape, config.dtype), AXES)
        return cls((KeysValues(room, room),) * layers, jnp.zeros(batch, jnp.int32))


def write(
    cached: Float[Array, "batch heads length head_dim"],
    new: Float[Array, "batch heads new head_dim"],
    starts: Int[Array, "batch"],
) -> Float[Array, "batch heads length head_dim"]:
    """Overwrites ``cached[b, :, starts[b]:starts[b] + new]`` with ``new[b]``."""
    if cached.shape[0] == 1:
        # A plain update in place; the batched form below lowers to a scatter.
        written = lax.dynamic_update_slice(cached, new, (0, 0, starts[0], 0))
    else:
        written = write_rows(cached, new, starts, axis=2)
    return constrain(written, AXES)


def write_nodes(
    cached: Float[Array, "batch heads length head_dim"],
    new: Float[Array, "batch heads nodes head_dim"],
    nodes: Nodes,
) -> Float[Array, "batch heads length head_dim"]:
    """Overwrites the nodes' slots ``cached[b, :, slots[b, n]]`` with ``new[b, :, n]``."""
    slots = nodes.slots
    if nodes.consecutive:
        return write(cached, new, slots[:, 0])
    written = jax.vmap(lambda row, update, at: row.at[:, at].set(update))(cached, new, slots)
    return constrain(written, AXES)


def move(
    cached: Float[Array, "batch heads length head_dim"],
    slots: Int[Array, "batch nodes"],
    starts: Int[Array, "batch"],
) -> Float[Array, "batch heads length head_dim"]:
    """Copies what is in ``slots[b]`` to consecutive slots from ``starts[b]`` on."""
    moved = jnp.take_along_axis(cached, slots[:, None, :, None], axis=2)
    return write(cached, moved, starts)
