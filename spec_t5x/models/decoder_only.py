"""A decoder-only T5: T5's decoder without a source, causal or with a prefix.

The parameter tree and its logical axes are those of T5X's ``examples/decoder_only``. In a
prefix language model the tokens of the prompt see one another in both directions
(Raffel et al. 2020, section 3.2.1).
"""

import dataclasses
import functools
from collections.abc import Sequence

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.interfaces import Nodes
from spec_t5x.models import cache as cache_lib
from spec_t5x.models.attention import (
    Attention,
    ExtendSelf,
    RelativeBias,
    after_texts,
    by_write,
    distances_after,
    in_slots,
)
from spec_t5x.models.cache import DecoderOnlyCache, KeysValues
from spec_t5x.models.cached_model import TextModel
from spec_t5x.models.layers import Dense, Embed, Mlp, RMSNorm
from spec_t5x.models.t5 import NetworkConfig
from spec_t5x.types import PAD_ID, Array, Bool, Float, Float32, Int, PyTree

# T5X's example has these two as constants.
_NUM_BUCKETS = 32
_MAX_DISTANCE = 128


@dataclasses.dataclass(frozen=True)
class DecoderOnlyConfig(NetworkConfig):
    """Sizes of a decoder-only T5. The names are T5X's."""

    vocab_size: int = 32128
    emb_dim: int = 512
    num_heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 2048
    num_layers: int = 6
    mlp_activations: Sequence[str] = ("relu",)
    logits_via_embedding: bool = False
    dropout_rate: float = 0.1
    # What the layers compute in; parameters and logits are float32 regardless.
    dtype: str = "float32"


class DecoderOnlyLayer(nn.Module):
    """Self-attention, then feed-forward."""

    config: DecoderOnlyConfig

    def setup(self):
        cfg = self.config
        self.pre_self_attention_layer_norm = RMSNorm(dtype=cfg.dtype)
        self.self_attention = Attention(
            cfg.emb_dim, cfg.num_heads, cfg.head_dim, cfg.dropout_rate, cfg.dtype
        )
        self.pre_mlp_layer_norm = RMSNorm(dtype=cfg.dtype)
        self.mlp = Mlp(cfg.mlp_dim, cfg.mlp_activations, cfg.dropout_rate, cfg.dtype)

    def extend(self, inputs, cache: KeysValues, extend_self: ExtendSelf):
        """The layer over new tokens: their states and the cache."""
        normed = self.pre_self_attention_layer_norm(inputs)
        attended, keys, values = extend_self(self.self_attention, normed, cache)
        states = inputs + attended
        return states + self.mlp(self.pre_mlp_layer_norm(states)), KeysValues(keys, values)


class _Decoder(nn.Module):
    """Embedding, layers, output layer: all under ``decoder``, as in T5X."""

    config: DecoderOnlyConfig

    def setup(self):
        cfg = self.config
        self.token_embedder = Embed(cfg.vocab_size, cfg.emb_dim, cfg.dtype)
        self.relpos_bias = RelativeBias(cfg.num_heads, _NUM_BUCKETS, _MAX_DISTANCE)
        self.layers = [DecoderOnlyLayer(cfg) for _ in range(cfg.num_layers)]
        self.decoder_norm = RMSNorm(dtype=cfg.dtype)
        if not cfg.logits_via_embedding:
            self.logits_dense = Dense(cfg.vocab_size, ("embed", "vocab"))

    def extend(self, cache: DecoderOnlyCache, tokens, bidirectional):
        embedded, new = self.token_embedder(tokens), tokens.shape[1]
        if bidirectional is None:
            extend_self = after_texts(embedded, cache, self.relpos_bias)
        else:
            distances = distances_after(cache, new)
            known = jnp.pad(bidirectional, ((0, 0), (0, cache.max_length - new)))
            visible = (distances >= 0) | (bidirectional[:, :, None] & known[:, None, :])
            write = functools.partial(cache_lib.write, starts=cache.lengths)
            extend_self = by_write(write, distances, visible, self.relpos_bias)
        states, extended = cache.through(self.layers, embedded, extend_self)
        return self.decoder_norm(states), extended.at(cache.lengths + new)

    def extend_nodes(self, cache: DecoderOnlyCache, nodes: Nodes):
        embedded = self.token_embedder(nodes.tokens)
        extend_self = in_slots(embedded, cache, nodes, self.relpos_bias)
        states, cache = cache.through(self.layers, embedded, extend_self)
        return self.decoder_norm(states), cache

    def logits(self, states):
        if self.config.logits_via_embedding:
            return self.token_embedder.attend(states)
        return self.logits_dense(states)


class DecoderOnlyTransformer(nn.Module):
    """The decoder-only T5, to be called over a static cache."""

    config: DecoderOnlyConfig

    def setup(self):
        self.decoder = _Decoder(self.config)

    def __call__(
        self, cache: DecoderOnlyCache, tokens: Int[Array, "batch new"]
    ) -> Float32[Array, "batch new vocab"]:
        """Logits after new tokens, by which all parameters are initialized."""
        return self.logits(self.extend(cache, tokens)[0])

    def extend(
        self,
        cache: DecoderOnlyCache,
        tokens: Int[Array, "batch new"],
        bidirectional: Bool[Array, "batch new"] | None = None,
    ) -> tuple[Float[Array, "batch new embed"], DecoderOnlyCache]:
        """Feeds ``tokens[b]`` at position ``cache.lengths[b]``: normed states, longer cache.

        Tokens that are ``bidirectional`` see one another whatever their order; they are
        given to an empty cache.
        """
        return self.decoder.extend(cache, tokens, bidirectional)

    def extend_nodes(
        self, cache: DecoderOnlyCache, nodes: Nodes
    ) -> tuple[Float[Array, "batch nodes embed"], DecoderOnlyCache]:
        """Feeds tokens that need not follow one another, each to a slot of the cache."""
        return self.decoder.extend_nodes(cache, nodes)

    def logits(
        self, states: Float[Array, "batch length embed"]
    ) -> Float32[Array, "batch length vocab"]:
        """The output layer: logits of normed states."""
        return self.decoder.logits(states)


@flax.struct.dataclass
class DecoderOnlyModel(TextModel):
    """A decoder-only T5 that scores tokens against a static cache; T5X gives its parameters."""

    module: DecoderOnlyTransformer = flax.struct.field(pytree_node=False)
    # Whether a prompt's tokens see one another in both directions.
    prefix_lm: bool = flax.struct.field(pytree_node=False, default=False, kw_only=True)

    def read_prompts(
        self, cache: DecoderOnlyCache, prompts: Int[Array, "batch width"]
    ) -> DecoderOnlyCache:
        """The cache after ``prompts``, whose tokens see one another in a prefix model."""
        if not self.prefix_lm:
            return super().read_prompts(cache, prompts)
        known = jnp.pad(prompts[:, 1:] != PAD_ID, ((0, 0), (1, 0)), constant_values=True)
        return self._apply(cache, prompts, known, method="extend")[1]


def init_variables(module: DecoderOnlyTransformer, rng: jax.Array) -> PyTree:
    """Initial variables of a network, ``params`` and ``params_axes``."""
    cache = DecoderOnlyCache.empty(module.config, module.config.num_layers, 1, 1)
    return module.init(rng, cache, jnp.zeros((1, 1), jnp.int32))
