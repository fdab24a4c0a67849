"""A decoder layer that continues from its target's states: the network of an EAGLE head.

EAGLE (Li et al. 2024, arXiv 2401.15077) drafts with one decoder layer over the last token's
embedding and the target's state that the token was predicted from, fused by a linear map; from
the second drafted token on, the layer's own state replaces the target's. Here the layer attends
to the source, too, with the keys and values of one of the target's decoder layers. If the head
is narrower than the target, a map first reduces the target's states.
"""

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax.numpy as jnp

from spec_t5x.interfaces import Nodes
from spec_t5x.models.cache import KVCache
from spec_t5x.models.layers import Dense
from spec_t5x.models.t5 import CachedNetwork, Decoder, T5Config
from spec_t5x.sampling.distributions import write_rows
from spec_t5x.types import Array, Float, Float32, Int


@dataclasses.dataclass(frozen=True)
class EagleConfig(T5Config):
    """Configuration of a head; all but layers and width are the target's."""

    # Width of the target's states, embeddings and encoder output.
    target_dim: int = 512
    # The target's decoder layers, from 0, whose outputs the head reads beside the last layer's.
    depths: Sequence[int] = ()
    # Whether the head attends to the source.
    reads_source: bool = True

    @property
    def has_source(self) -> bool:
        """True if the layers attend to a source."""
        return self.reads_source

    @property
    def state_size(self) -> int:
        """Width of the target's states that the head reads."""
        return self.target_dim * (1 + len(self.depths))


@flax.struct.dataclass(kw_only=True)
class DraftingCache(KVCache):
    """Cache of a head while it drafts, with the head's states after the latest tokens, by slot."""

    states: Float[Array, "batch nodes embed"]
    # Slot of the first state.
    first: Int[Array, "batch"]

    @classmethod
    def after(
        cls, cache: KVCache, states: Float[Array, "batch embed"], room: int
    ) -> "DraftingCache":
        """Returns ``cache`` with ``room`` states a row; ``states``, the last tokens', are first."""
        empty = jnp.zeros((states.shape[0], room, states.shape[1]), states.dtype)
        added = {"first": cache.lengths - 1, "states": empty.at[:, 0].set(states)}
        return cls(cache.layers, cache.lengths, cache.source_mask, **added)

    def states_at(self, slots: Int[Array, "batch new"]) -> Float[Array, "batch new embed"]:
        """Returns the head's states after the tokens in ``slots``."""
        return jnp.take_along_axis(self.states, (slots - self.first[:, None])[..., None], axis=1)

    def with_states(self, states: Float[Array, "batch new embed"], slots: Int[Array, "batch new"]):
        """Returns the cache with the states after tokens in consecutive ``slots`` written."""
        return self.replace(states=write_rows(self.states, states, slots[:, 0] - self.first))


class EagleNetwork(CachedNetwork):
    """Decoder whose input is a token and the state that the token was predicted from."""

    config: EagleConfig

    def setup(self):
        cfg = self.config
        self.token_embedder = dataclasses.replace(cfg, emb_dim=cfg.target_dim).embedder()
        # No rule shards these axes, so each device has both maps whole.
        self.reduction = Dense(cfg.emb_dim, ("embed", "kv"), cfg.dtype)
        self.fusion = Dense(cfg.emb_dim, ("embed", "kv"), cfg.dtype)
        self.decoder = Decoder(cfg)

    def __call__(
        self, tokens: Int[Array, "batch length"], *, enable_dropout: bool = False
    ) -> Float32[Array, "batch length vocab"]:
        """Returns logits for states of zeros; ``init`` calls this to create all parameters."""
        zeros = jnp.zeros((*tokens.shape, self.config.state_size), self.config.dtype)
        given = self.fused(tokens, self.reduction(zeros)), zeros[..., : self.config.target_dim]
        allowed = jnp.ones((1, 1, 1, 1), bool)
        return self.logits(self.decoder(*given, allowed, allowed, not enable_dropout))

    def fused(
        self, tokens: Int[Array, "batch new"], states: Float[Array, "batch new embed"]
    ) -> Float[Array, "batch new embed"]:
        """Returns the layers' inputs: embeddings of tokens, each with the state before it."""
        embedded = self.token_embedder(tokens)
        return self.fusion(jnp.concatenate([embedded, states.astype(embedded.dtype)], axis=-1))

    def follow(
        self,
        cache: KVCache,
        tokens: Int[Array, "batch new"],
        states: Float[Array, "batch new target_states"],
    ) -> tuple[Float[Array, "batch new embed"], KVCache]:
        """Feeds tokens with the target's states that predicted them; returns states and cache."""
        # States of further layers, which another draft uses, may follow.
        reduced = self.reduction(states[..., : self.config.state_size])
        return self.decoder.extend(self.fused(tokens, reduced), cache)

    def extend(
        self, cache: DraftingCache, tokens: Int[Array, "batch 1"]
    ) -> tuple[Float[Array, "batch 1 embed"], DraftingCache]:
        """Feeds a drafted token with the head's state before it; returns its state, and cache."""
        slots = cache.lengths[:, None]
        states, cache = self.decoder.extend(self.fused(tokens, cache.states_at(slots - 1)), cache)
        return states, cache.with_states(states, slots)

    def extend_nodes(
        self, cache: DraftingCache, nodes: Nodes
    ) -> tuple[Float[Array, "batch nodes embed"], DraftingCache]:
        """Feeds a tree's nodes, each with the head's state at its parent; returns as ``extend``."""
        before = nodes.slot_positions[:, None] == nodes.positions[..., None] - 1
        parents = jnp.argmax(nodes.visible & before, axis=-1)
        fused = self.fused(nodes.tokens, cache.states_at(parents))
        states, cache = self.decoder.extend_nodes(fused, cache, nodes)
        return states, cache.with_states(states, nodes.slots)
