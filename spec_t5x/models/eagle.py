"""A decoder layer that goes on from its target's states: the network of an EAGLE head.

EAGLE (Li et al. 2024, arXiv 2401.15077) drafts with one decoder layer over the last token's
embedding and the target's state that the token was predicted from, fused by a linear map; from
its second token on, its own state takes the place of the target's. Here the layer attends to
the source, too, as the target's own decoder layers do.

Training follows what drafting does ("training-time test" of EAGLE-3, Li et al. 2025, arXiv
2503.01840): the network is unrolled over steps of its own, and at each step attends to what it
would have cached by then.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.interfaces import Nodes
from spec_t5x.models.attention import mask_bias
from spec_t5x.models.cache import DecoderCache
from spec_t5x.models.layers import Dense
from spec_t5x.models.t5 import DecoderLayer, Transformer
from spec_t5x.types import Array, Float, Int, PyTree


@flax.struct.dataclass
class DraftingCache(DecoderCache):
    """A decoder's cache while it drafts: with its states after the latest tokens, by slot."""

    states: Float[Array, "batch nodes embed"]
    # The slot that the first of them is of.
    first: Int[Array, "batch"]

    @classmethod
    def after(
        cls, cache: DecoderCache, states: Float[Array, "batch embed"], room: int
    ) -> "DraftingCache":
        """The cache after a row's last token, whose states are given, with room for so many."""
        room = jnp.zeros((states.shape[0], room, states.shape[1]), states.dtype)
        first = cache.lengths - 1
        states = room.at[:, 0].set(states)
        return cls(cache.layers, cache.source_mask, cache.lengths, states=states, first=first)

    def states_at(self, slots: Int[Array, "batch new"]) -> Float[Array, "batch new embed"]:
        """The states after what these slots hold."""
        return jnp.take_along_axis(self.states, (slots - self.first[:, None])[..., None], axis=1)

    def with_states(self, states: Float[Array, "batch new embed"], slots: Int[Array, "batch new"]):
        """The cache with the states after tokens whose slots follow one another."""
        write = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start, 0)))
        return self.replace(states=write(self.states, states, slots[:, 0] - self.first))


class EagleNetwork(Transformer):
    """A ``Transformer`` whose decoder takes a token and the state before it."""

    def setup(self):
        super().setup()
        # Each device of a mesh has all of it.
        self.fusion = Dense(self.config.emb_dim, ("fused", "embed"), self.config.dtype)

    def _fused(
        self, tokens: Int[Array, "batch new"], states: Float[Array, "batch new embed"]
    ) -> Float[Array, "batch new embed"]:
        embedded = self.token_embedder(tokens)
        return self.fusion(jnp.concatenate([embedded, states.astype(embedded.dtype)], axis=-1))

    def follow(
        self,
        cache: DecoderCache,
        tokens: Int[Array, "batch new"],
        states: Float[Array, "batch new embed"],
    ) -> tuple[Float[Array, "batch new embed"], DecoderCache]:
        """Feeds tokens and the target's states that they were predicted from."""
        return self.decoder.extend(self._fused(tokens, states), cache)

    def extend(
        self, cache: DraftingCache, tokens: Int[Array, "batch 1"]
    ) -> tuple[Float[Array, "batch 1 embed"], DraftingCache]:
        """Feeds a token of its own, after its own state."""
        slots = cache.lengths[:, None]
        states, cache = self.follow(cache, tokens, cache.states_at(slots - 1))
        return states, cache.with_states(states, slots)

    def extend_nodes(
        self, cache: DraftingCache, nodes: Nodes
    ) -> tuple[Float[Array, "batch nodes embed"], DraftingCache]:
        """Feeds nodes of a tree, each after its own state at the node that it follows."""
        before = nodes.slot_positions[:, None] == nodes.positions[..., None] - 1
        parents = jnp.argmax(nodes.visible & before, axis=-1)
        fused = self._fused(nodes.tokens, cache.states_at(parents))
        states, cache = self.decoder.extend_nodes(fused, cache, nodes)
        return states, cache.with_states(states, nodes.slots)

    def unroll(
        self,
        encoded: Float[Array, "batch source embed"],
        source: Int[Array, "batch source"],
        shifted: Int[Array, "batch length"],
        states: Float[Array, "batch length embed"],
        num_steps: int,
        *,
        enable_dropout: bool = False,
    ) -> list[Float[Array, "batch length embed"]]:
        """States at all positions of a text as its first, second, … step of drafting has them.

        Those of step i mean nothing at the first i positions, counted from 0.

        Args:
          encoded: the target's encoder's output.
          source: what was encoded.
          shifted: the text from its start token on.
          states: the target's at each position.
          num_steps: steps to unroll.
          enable_dropout: as of ``Transformer.encode``.
        """
        cross_bias = mask_bias((source > 0)[:, None, None, :])
        distances = jnp.arange(shifted.shape[1])[:, None] - jnp.arange(shifted.shape[1])[None]
        inputs: list[list[Array]] = [[] for _ in self.decoder.layers]
        unrolled = []
        for step in range(num_steps):
            # Text that is older than the draft was fed with the target's states.
            seen = [distances >= step, *(distances == step - i for i in range(1, step + 1))]
            masks = [mask_bias(each)[None, None] for each in seen]
            states = self._fused(shifted, jnp.pad(states[:, :-1], ((0, 0), (1, 0), (0, 0))))
            for layer, of_layer in zip(self.decoder.layers, inputs, strict=True):
                relpos = layer.relpos_bias or self.decoder.relpos_bias
                bias = relpos.full(shifted.shape[1], False)
                biases = [bias + mask for mask in masks]
                states = _unrolled(
                    layer, states, of_layer, biases, (encoded, cross_bias), not enable_dropout
                )
            states = self.decoder.decoder_norm(states)
            unrolled.append(states)
        return unrolled


def _unrolled(layer: DecoderLayer, states, earlier: list[Array], biases, source, deterministic):
    """A layer over one step, whose input is put to those of earlier steps: all are attended to."""

    def add(states, update):
        return states + layer.residual_dropout(update, deterministic=deterministic)

    normed = layer.pre_self_attention_layer_norm(states)
    before = zip(earlier, biases[:-1], strict=True)
    attended = layer.self_attention.attend_to_itself(normed, biases[-1], deterministic, *before)
    earlier.append(normed)
    states = add(states, attended)
    normed = layer.pre_cross_attention_layer_norm(states)
    states = add(states, layer.encoder_decoder_attention(normed, *source, deterministic))
    return add(states, layer.mlp(layer.pre_mlp_layer_norm(states), deterministic))


def first_fusion(width: int) -> PyTree:
    """The map that passes the embedding on and leaves the state out: where training starts."""
    return {"kernel": jnp.concatenate([jnp.eye(width), jnp.zeros((width, width))])}
