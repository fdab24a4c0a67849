"""Network GPT: a decoder-only transformer with GPT-2's layout (Radford et al. 2019).

A GPT has learned absolute positions, layer norms with biases before each block, GELU, and an output
layer tied to the embedding by default. The paper's language models are GPTs (section 4.2: 97M and
6M parameters). The start token (id 0) is input only: its logit is ``MASKED``, so that it is never
generated.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import flax.linen as nn
import flax.struct
import jax.numpy as jnp

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Nodes
from spec_t5x.models.attention import NewTokens, Traits, after_texts, in_slots, mask_bias
from spec_t5x.models.binding import Family
from spec_t5x.models.cache import KVCache, LayerCache
from spec_t5x.models.cached_model import TextModel
from spec_t5x.models.layers import Dense, RMSNorm, dropout, times_table
from spec_t5x.models.logical_axes import constrain, param_with_axes
from spec_t5x.models.t5 import NetworkConfig, SelfAttentionLayer, without_added
from spec_t5x.models.weights import rows
from spec_t5x.types import Array, Float, Float32, Int

# Standard deviation of new embeddings, as in GPT-2.
_INIT_STDDEV = 0.02


class LayerNorm(RMSNorm):
    """GPT-2's layer norm, with mean and bias; its statistics are computed in float32."""

    epsilon: float = 1e-5
    centred: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class GPTConfig(NetworkConfig):
    """Sizes of a GPT; by default the paper's target of 97M parameters."""

    vocab_size: int = 8000
    emb_dim: int = 768
    num_heads: int = 12
    num_layers: int = 12
    mlp_dim: int = 3072
    # Number of learned positions, including the start token's.
    max_length: int = 512
    # If True, the output layer is the embedding.
    logits_via_embedding: bool = True
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-5
    # Type that the layers compute in; parameters and logits are float32.
    dtype: str = "float32"

    has_source: ClassVar[bool] = False
    norm: ClassVar[type[RMSNorm]] = LayerNorm
    use_bias: ClassVar[bool] = True
    has_relpos: ClassVar[bool] = False
    added_rows: ClassVar[int] = 1
    mlp_activations: ClassVar[Sequence[str]] = ("gelu",)

    def __post_init__(self):
        super().__post_init__()
        if self.emb_dim % self.num_heads:
            raise InputError(
                f"GPTConfig.emb_dim is {self.emb_dim} and num_heads {self.num_heads}: give an "
                "emb_dim that num_heads divides"
            )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.emb_dim // self.num_heads

    def attention_traits(self, layer: int) -> Traits:
        """Returns the same traits for every layer: scores divided by ``sqrt(head_dim)``, biases."""
        return Traits(scale=self.head_dim**-0.5, use_bias=True)


class GPTLayer(SelfAttentionLayer):
    """Layer of a GPT: self-attention over whole sequences or over a cache, then feed-forward."""

    def extend(self, states, cache: LayerCache, tokens: NewTokens):
        """Computes the layer for new tokens; returns the tokens' states and the layer's cache."""
        states, cache = self.attend_to_cache(states, cache, tokens)
        return self.feed_forward(states), cache

    def attend_to_cache(self, states, cache: LayerCache, tokens: NewTokens):
        """Returns new tokens' states + self-attention over the cache, and the cache with them."""
        normed = self.pre_attention_layer_norm(states)
        attended, cache = self.attention.extend(normed, cache, tokens, self.relpos_bias)
        return self.add(states, attended, self.post_attention_layer_norm), cache


class GPT(nn.Module):
    """Network that scores whole sequences (``__call__``) or extends a static cache (``extend``)."""

    config: GPTConfig

    def setup(self):
        cfg = self.config
        init = nn.initializers.normal(stddev=_INIT_STDDEV)
        shape, axes = (cfg.vocab_size, cfg.emb_dim), ("vocab", "embed")
        self.token_embedding = param_with_axes(self, "token_embedding", init, shape, axes)
        shape, axes = (cfg.max_length, cfg.emb_dim), ("length", "embed")
        self.position_embedding = param_with_axes(self, "position_embedding", init, shape, axes)
        self.layers = [GPTLayer(cfg, i) for i in range(cfg.num_layers)]
        self.final_layer_norm = LayerNorm(cfg.layer_norm_epsilon, cfg.dtype)
        self.input_dropout = dropout(cfg.dropout_rate)
        if not cfg.logits_via_embedding:
            self.logits_dense = Dense(cfg.vocab_size, ("embed", "vocab"))

    def __call__(
        self, tokens: Int[Array, "batch length"], *, enable_dropout: bool = True
    ) -> Float32[Array, "batch length vocab"]:
        """Returns next-token logits of sequences that begin with the start token.

        Attention is causal, so that padding at the end needs no mask. Dropout draws from the
        ``dropout`` rng stream.
        """
        length, deterministic = tokens.shape[1], not enable_dropout
        states = self._embed(tokens, jnp.broadcast_to(jnp.arange(length)[None], tokens.shape))
        states = self.input_dropout(states, deterministic=deterministic)
        bias = mask_bias(jnp.tril(jnp.ones((1, 1, length, length), bool)))
        for layer in self.layers:
            states = layer(states, bias, deterministic)
        return self.logits(self.final_layer_norm(states))

    def extend(
        self, cache: KVCache, tokens: Int[Array, "batch new"]
    ) -> tuple[Float[Array, "batch new embed"], KVCache]:
        """Feeds ``tokens[b]`` at the positions from ``cache.lengths[b]`` on.

        Returns the normed states of the new tokens, which ``logits`` takes, and the cache, whose
        lengths grow by ``new``. The caller ensures that ``lengths + new`` fits in the cache.
        """
        new = tokens.shape[1]
        embedded = self._embed(tokens, cache.lengths[:, None] + jnp.arange(new)[None, :])
        states, extended = self._extend(embedded, cache, after_texts(cache, new))
        return states, extended.at(cache.lengths + new)

    def extend_nodes(
        self, cache: KVCache, nodes: Nodes
    ) -> tuple[Float[Array, "batch nodes embed"], KVCache]:
        """Feeds tokens of a tree or of beams to slots; returns normed states and the cache."""
        embedded = self._embed(nodes.tokens, nodes.positions)
        return self._extend(embedded, cache, in_slots(nodes))

    def logits(
        self, states: Float[Array, "batch length embed"]
    ) -> Float32[Array, "batch length vocab"]:
        """Applies the output layer to normed states; returns float32 logits."""
        if self.config.logits_via_embedding:
            logits = times_table(states, self.token_embedding)
        else:
            logits = self.logits_dense(states)
        return without_added(logits, self.config)

    def _extend(self, states, cache: KVCache, tokens: NewTokens):
        outputs, cache = cache.through(self.layers, states, tokens)
        return self.final_layer_norm(outputs[-1]), cache

    def _embed(self, tokens, positions):
        # Clips: only discarded drafts exceed the positions (``interfaces.check_positions``).
        placed = jnp.take(self.position_embedding, positions, axis=0, mode="clip")
        embedded = (rows(self.token_embedding, tokens) + placed).astype(self.config.dtype)
        return constrain(embedded, ("batch", "length", "embed"))


@flax.struct.dataclass
class GPTModel(TextModel):
    """Target or draft model: a GPT with its parameters and a static cache."""

    network = GPT

    @property
    def max_positions(self) -> int:
        """Number of positions that can be fed, the start token's included."""
        return self.config.max_length


FAMILY = Family(config=GPTConfig, model=GPTModel)
