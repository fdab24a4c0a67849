"""The encoder-decoder: T5 1.0 and 1.1 (Flan, mT5, umT5, ByT5), and T5Gemma by its parts.

The parameter tree and its logical axes are those of T5X's ``examples/t5``. What a network has of
its own is in its configuration: norms, traits of attention, where the source is attended to. Three
ways to call it:

* ``encode`` the source;
* ``decode`` a whole target sequence, teacher-forced (with ``encode`` this is
  ``__call__``, the training path);
* ``extend`` a static cache by any number of tokens, each row at its own position
  (``extend_nodes`` by tokens that need not follow one another).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_t5x.errors import InputError, check_at_least
from spec_t5x.interfaces import Nodes
from spec_t5x.models import cache as cache_lib
from spec_t5x.models.attention import (
    MASKED,
    Attention,
    NewTokens,
    PairBias,
    RelativeBias,
    Traits,
    after_texts,
    in_slots,
    mask_bias,
)
from spec_t5x.models.cache import Cache, DecoderCache, KeysValues, LayerCache
from spec_t5x.models.layers import (
    ACTIVATIONS,
    Dense,
    Embed,
    Mlp,
    RMSNorm,
    dropout,
)
from spec_t5x.models.logical_axes import constrain
from spec_t5x.types import PAD_ID, Array, Bool, Float, Float32, Int


class NetworkConfig:
    """Of a frozen dataclass with the sizes of a network: what is checked of it, and JSON."""

    # Whether the decoder attends to a source, too: after its text, or in one softmax with it.
    has_source: ClassVar[bool] = True
    merges_source: ClassVar[bool] = False
    # Of all layers; and whether what a block adds is normed as well.
    norm: ClassVar[type[RMSNorm]] = RMSNorm
    has_post_norms: ClassVar[bool] = False
    # Whether all maps have biases.
    use_bias: ClassVar[bool] = False
    # Whether there are biases by relative position.
    has_relpos: ClassVar[bool] = True
    # Whether each layer has a bias by relative position of its own.
    relpos_per_layer: ClassVar[bool] = False
    # Rows of the vocabulary that no text holds: id 0, which starts it, and those after all others.
    added_rows: ClassVar[int] = 0
    # Whether the encoder looks tokens up in a table of its own.
    has_source_embedder: ClassVar[bool] = False
    # A token whose embedding is not of the table; 0 for none.
    image_end_id: ClassVar[int] = 0
    # What embeddings are multiplied by.
    input_scale: ClassVar[float] = 1.0
    # Logits are bent to lie between this and its negative; 0 leaves them.
    logits_softcap: ClassVar[float] = 0.0

    @property
    def output_scale(self) -> float:
        """What the scores of the embeddings as the output layer are multiplied by."""
        return self.emb_dim**-0.5

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads

    @property
    def of_encoder(self) -> "NetworkConfig":
        """The configuration with the encoder's sizes as its own."""
        return self

    def attention_traits(self, layer: int) -> Traits:
        """Of self-attention in a layer of the decoder; of ``of_encoder``, of the encoder."""
        return Traits(use_bias=self.use_bias)

    @property
    def source_traits(self) -> Traits:
        """Of attention to the source."""
        return Traits(use_bias=self.use_bias)

    def with_layers(self, *, encoder: Sequence[int], decoder: Sequence[int]):
        """The configuration of these layers alone."""
        return dataclasses.replace(
            self, num_encoder_layers=len(encoder), num_decoder_layers=len(decoder)
        )

    def __post_init__(self):
        name = type(self).__name__
        sizes = [field for field in dataclasses.fields(self) if field.type is int]
        check_at_least(self, **{field.name: int(field.default != 0) for field in sizes})
        for field in dataclasses.fields(self):
            # gin and JSON hand lists over; the config must stay hashable.
            if isinstance(getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
        if hasattr(self, "mlp_activations"):
            for activation in set(self.mlp_activations) - set(ACTIVATIONS):
                known = ", ".join(ACTIVATIONS)
                raise InputError(f"{name}.mlp_activations has {activation!r}: choose from {known}")
        if self.dtype not in ("float32", "bfloat16"):
            raise InputError(f"{name}.dtype is {self.dtype!r}: choose float32 or bfloat16")

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON can hold it."""
        values = dataclasses.asdict(self)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]):
        """The inverse of ``to_dict``; unknown names are an ``InputError``."""
        check_names(cls, values, cls.__name__.removesuffix("Config"))
        return cls(**values)


def check_names(cls: type, values: dict[str, Any], kind: str) -> None:
    """Raises ``InputError`` for a name that is no field of the dataclass ``cls``."""
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InputError(
            f"unknown {kind} setting {unknown[0]!r}: the known ones are {', '.join(sorted(known))}"
        )


@dataclasses.dataclass(frozen=True)
class T5Config(NetworkConfig):
    """Sizes of a T5. The defaults are T5 1.0 small."""

    vocab_size: int = 32128
    emb_dim: int = 512
    num_heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 2048
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    # ('relu',) in T5 1.0, ('gelu', 'linear') in 1.1, Flan, mT5 and ByT5.
    mlp_activations: Sequence[str] = ("relu",)
    # T5 1.0 ties its output layer to the embedding, 1.1 does not.
    logits_via_embedding: bool = True
    dropout_rate: float = 0.1
    # What the layers compute in; parameters and logits are float32 regardless.
    dtype: str = "float32"
    relpos_num_buckets: int = 32
    relpos_max_distance: int = 128
    # A table for each layer, as umT5 and T5X's ``scalable_t5`` have it, instead of each stack.
    relpos_per_layer: bool = False
    # Where the checkpoint has other ids than T5's 0 that starts and pads and 1 that ends a text
    # (``data.mapped_vocabulary``).
    added_rows: int = 0
    layer_norm_epsilon: float = 1e-6


class Layer(nn.Module):
    """The common base of layers: each block adds to the states, and the last is feed-forward."""

    config: NetworkConfig
    number: int

    def setup(self):
        cfg = self.config
        self.relpos_bias = _relative_bias(cfg) if cfg.relpos_per_layer else None
        self.pre_mlp_layer_norm = _norm(cfg)
        self.mlp = _mlp(cfg)
        self.post_mlp_layer_norm = _post_norm(cfg)
        self.residual_dropout = dropout(cfg.dropout_rate)

    def add(self, states, update, norm: RMSNorm | None, deterministic: bool = True):
        """``states`` and what a block adds to them, normed where there is a norm."""
        update = update if norm is None else norm(update)
        return states + self.residual_dropout(update, deterministic=deterministic)

    def feed_forward(self, states, deterministic: bool = True):
        """``states`` and what the feed-forward block makes of them."""
        update = self.mlp(self.pre_mlp_layer_norm(states), deterministic)
        return self.add(states, update, self.post_mlp_layer_norm, deterministic)


class SelfAttentionLayer(Layer):
    """Self-attention, then feed-forward: a layer of an encoder, and of a GPT."""

    def setup(self):
        super().setup()
        cfg = self.config
        self.pre_attention_layer_norm = _norm(cfg)
        self.attention = _attention(cfg, cfg.attention_traits(self.number))
        self.post_attention_layer_norm = _post_norm(cfg)

    def __call__(self, states, bias, deterministic):
        """The layer over whole sequences."""
        return self.feed_forward(self.attend(states, bias, deterministic), deterministic)

    def attend(self, states, bias, deterministic):
        """Self-attention over whole sequences."""
        normed = self.pre_attention_layer_norm(states)
        attended = self.attention.attend_to_itself(normed, bias, deterministic)
        return self.add(states, attended, self.post_attention_layer_norm, deterministic)

    def extend(self, states, cache: KeysValues, tokens: NewTokens):
        """The layer over new tokens: their states and the cache."""
        states, cache = self.attend_to_cache(states, cache, tokens)
        return self.feed_forward(states), cache

    def attend_to_cache(self, states, cache: KeysValues, tokens: NewTokens):
        """Self-attention of new tokens."""
        normed = self.pre_attention_layer_norm(states)
        attended, cache = self.attention.extend(normed, cache, tokens, self.relpos_bias)
        return self.add(states, attended, self.post_attention_layer_norm), cache


class DecoderLayer(Layer):
    """Causal self-attention, attention to the source where there is one, feed-forward."""

    def setup(self):
        super().setup()
        cfg = self.config
        self.pre_self_attention_layer_norm = _norm(cfg)
        self.self_attention = _attention(cfg, cfg.attention_traits(self.number))
        self.post_self_attention_layer_norm = _post_norm(cfg)
        if cfg.has_source and not cfg.merges_source:
            self.pre_cross_attention_layer_norm = _norm(cfg)
            self.encoder_decoder_attention = _attention(cfg, cfg.source_traits)
            self.post_cross_attention_layer_norm = _post_norm(cfg)

    @property
    def source_attention(self) -> Attention:
        """What attends to the source."""
        merges = self.config.merges_source
        return self.self_attention if merges else self.encoder_decoder_attention

    def __call__(self, inputs, encoded, bias, cross_bias, deterministic, earlier=()):
        """The layer over a whole sequence, teacher-forced.

        ``earlier`` are other inputs that it attends to as to its own, each with a bias.
        """
        norm, merges = self.pre_self_attention_layer_norm, self.config.merges_source
        sources = [(norm(each), its_bias) for each, its_bias in earlier]
        sources += [(encoded, cross_bias)] if merges else []
        attended = self.self_attention.attend_to_itself(norm(inputs), bias, deterministic, *sources)
        states = self.add(inputs, attended, self.post_self_attention_layer_norm, deterministic)
        if self.config.has_source and not merges:
            normed = self.pre_cross_attention_layer_norm(states)
            attended = self.encoder_decoder_attention(normed, encoded, cross_bias, deterministic)
            states = self.add(states, attended, self.post_cross_attention_layer_norm, deterministic)
        return self.feed_forward(states, deterministic)

    def empty_cache(self, encoded, max_length: int) -> LayerCache:
        """Room for ``max_length`` tokens, and the source's keys and values."""
        cfg = self.config
        cross_keys, cross_values = self.source_attention.keys_values(encoded)
        shape = encoded.shape[0], cfg.num_kv_heads, max_length, cfg.head_dim
        room = constrain(jnp.zeros(shape, cfg.dtype), cache_lib.AXES)
        return LayerCache(room, room, cross_keys, cross_values)

    def extend(self, states, cache: KeysValues, tokens: NewTokens, cross_bias):
        """The layer over new tokens: their states and the cache."""
        states, cache = self.attend_to_cache(states, cache, tokens, cross_bias)
        if self.config.has_source and not self.config.merges_source:
            states = self.attend_to_source(states, cache, cross_bias)
        return self.feed_forward(states), cache

    def attend_to_cache(self, states, cache: KeysValues, tokens: NewTokens, cross_bias):
        """Self-attention of new tokens; to the source as well, where one softmax has both."""
        source = None
        if self.config.merges_source:
            source = cache.cross_keys, cache.cross_values, cross_bias
        normed = self.pre_self_attention_layer_norm(states)
        given = normed, cache, tokens, self.relpos_bias, source
        attended, cache = self.self_attention.extend(*given)
        return self.add(states, attended, self.post_self_attention_layer_norm), cache

    def attend_to_source(self, states, cache: LayerCache, cross_bias):
        """Attention of new tokens to the source."""
        normed = self.pre_cross_attention_layer_norm(states)
        source = cache.cross_keys, cache.cross_values, cross_bias
        attended = self.encoder_decoder_attention.attend_to_sources(normed, *source)
        return self.add(states, attended, self.post_cross_attention_layer_norm)


class Encoder(nn.Module):
    """The encoder stack, from embedded tokens to its normed output."""

    config: NetworkConfig

    def setup(self):
        cfg = self.config
        self.relpos_bias = _shared_bias(cfg)
        self.layers = [SelfAttentionLayer(cfg, i) for i in range(cfg.num_encoder_layers)]
        self.encoder_norm = _norm(cfg)
        self.input_dropout = dropout(cfg.dropout_rate)
        self.output_dropout = nn.Dropout(cfg.dropout_rate)

    def __call__(self, embedded, allowed, deterministic):
        states = self.input_dropout(embedded, deterministic=deterministic)
        length = embedded.shape[1]

        def bias_of(relpos: RelativeBias | None, traits: Traits) -> PairBias:
            by_position = None if relpos is None else relpos.full(length, True)
            seen = allowed if traits.reach is None else allowed & _within(length, *traits.reach)
            return PairBias(by_position, seen, self.config.num_heads)

        for layer, bias in _with_bias(self, bias_of):
            states = layer(states, bias, deterministic)
        return self.output_dropout(self.encoder_norm(states), deterministic=deterministic)


class Decoder(nn.Module):
    """The decoder stack, from embedded tokens to its normed output."""

    config: NetworkConfig
    # Layers, from 0, whose outputs stand beside that of the last.
    depths: Sequence[int] = ()

    def setup(self):
        cfg = self.config
        self.relpos_bias = _shared_bias(cfg)
        self.layers = [DecoderLayer(cfg, i) for i in range(cfg.num_decoder_layers)]
        self.decoder_norm = _norm(cfg)
        self.stack_dropout = dropout(cfg.dropout_rate)
        if not cfg.logits_via_embedding:
            # In float32 for stability, whatever the layers compute in.
            self.logits_dense = Dense(cfg.vocab_size, ("embed", "vocab"))

    def __call__(self, embedded, encoded, allowed, cross_allowed, deterministic):
        states = self.stack_dropout(embedded, deterministic=deterministic)
        length, cross_bias = embedded.shape[1], mask_bias(cross_allowed)

        def bias_of(relpos: RelativeBias | None, traits: Traits) -> Array:
            window = traits.window
            seen = allowed if window is None else allowed & _within(length, window - 1, length)
            mask = mask_bias(seen)
            return mask if relpos is None else relpos.full(length, False) + mask

        outputs = []
        for layer, bias in _with_bias(self, bias_of):
            states = layer(states, encoded, bias, cross_bias, deterministic)
            outputs.append(states)
        return self.stack_dropout(self._normed(outputs), deterministic=deterministic)

    def _normed(self, outputs: Sequence[Array]) -> Array:
        """The last layer's output, as the output layer takes it; and those of ``depths``."""
        normed = self.decoder_norm(outputs[-1])
        if not self.depths:
            return normed
        plain = RMSNorm(self.config.layer_norm_epsilon, self.config.dtype, parent=None)
        ones = {"params": {"scale": jnp.ones(normed.shape[-1])}}
        others = [plain.apply(ones, outputs[depth]) for depth in self.depths]
        return jnp.concatenate([normed, *others], axis=-1)

    def empty_cache(self, encoded, source_mask, max_length: int) -> DecoderCache:
        layers = tuple(layer.empty_cache(encoded, max_length) for layer in self.layers)
        return DecoderCache(layers, source_mask, jnp.zeros(encoded.shape[0], jnp.int32))

    def extend(self, embedded, cache: Cache, bidirectional=None):
        new = embedded.shape[1]
        tokens = after_texts(cache, new, self.relpos_bias, bidirectional)
        states, extended = self._extend(embedded, cache, tokens)
        return states, extended.at(cache.lengths + new)

    def extend_nodes(self, embedded, cache: Cache, nodes: Nodes):
        return self._extend(embedded, cache, in_slots(nodes, self.relpos_bias))

    def _extend(self, states, cache: Cache, tokens: NewTokens):
        cross_bias = None
        if self.config.has_source:
            cross_bias = mask_bias(cache.source_mask)[:, None, None, :]
        if self.config.merges_source:
            # Where scores of the text stand beside those of the source, each row has both.
            rows = states.shape[0] // cross_bias.shape[0]
            cross_bias = jnp.repeat(cross_bias, rows, axis=0)
        outputs, cache = cache.through(self.layers, states, tokens, cross_bias)
        return self._normed(outputs), cache


class CachedNetwork(nn.Module):
    """Calls over a static cache, of a network with a ``token_embedder`` and a ``decoder``."""

    config: NetworkConfig
    # Decoder layers, from 0, whose outputs the states hold beside that of the last: what a
    # draft that goes on from the states may learn from.
    depths: tuple[int, ...] = ()

    def extend(
        self,
        cache: Cache,
        tokens: Int[Array, "batch new"],
        bidirectional: Bool[Array, "batch new"] | None = None,
    ) -> tuple[Float[Array, "batch new embed"], Cache]:
        """Feeds ``tokens[b]`` to the decoder at position ``cache.lengths[b]``.

        Returns the normed states after each, which ``logits`` takes, and the cache, longer by
        ``new``. The caller makes sure that ``lengths + new`` stays within the cache. Which
        tokens are ``bidirectional``: see ``attention.after_texts``.
        """
        return self.decoder.extend(self.token_embedder(tokens), cache, bidirectional)

    def extend_nodes(
        self, cache: Cache, nodes: Nodes
    ) -> tuple[Float[Array, "batch nodes embed"], Cache]:
        """Feeds tokens that need not follow one another, each to a slot of the cache."""
        return self.decoder.extend_nodes(self.token_embedder(nodes.tokens), cache, nodes)

    def logits(
        self, states: Float[Array, "batch length embed"]
    ) -> Float32[Array, "batch length vocab"]:
        """The output layer: logits of the decoder's normed states."""
        states = states[..., : self.config.emb_dim]
        if self.config.logits_via_embedding:
            logits = self.token_embedder.attend(states)
        else:
            logits = self.decoder.logits_dense(states)
        cap = self.config.logits_softcap
        return without_added(cap * jnp.tanh(logits / cap) if cap else logits, self.config)


class Transformer(CachedNetwork):
    """The encoder-decoder."""

    config: NetworkConfig

    def setup(self):
        cfg = self.config
        self.token_embedder = embed(cfg)
        if cfg.has_source_embedder:
            self.source_embedder = embed(cfg.of_encoder)
        self.encoder = Encoder(cfg.of_encoder)
        self.decoder = Decoder(cfg, self.depths)

    def __call__(
        self,
        encoder_input_tokens: Int[Array, "batch source"],
        decoder_input_tokens: Int[Array, "batch length"],
        decoder_target_tokens: Int[Array, "batch length"],
        encoder_segment_ids: Int[Array, "batch source"] | None = None,
        decoder_segment_ids: Int[Array, "batch length"] | None = None,
        *,
        enable_dropout: bool = True,
    ) -> Float32[Array, "batch length vocab"]:
        """Logits of every target token given the ones before it (training).

        Dropout draws from the ``dropout`` rng stream. ``decoder_target_tokens``
        serves only to mask padding; segment ids keep packed examples apart.
        """
        encoded = self.encode(
            encoder_input_tokens, encoder_segment_ids, enable_dropout=enable_dropout
        )
        return self.decode(
            encoded,
            encoder_input_tokens,
            decoder_input_tokens,
            decoder_target_tokens,
            encoder_segment_ids,
            decoder_segment_ids,
            enable_dropout=enable_dropout,
        )

    def encode(
        self,
        encoder_input_tokens: Int[Array, "batch source"],
        encoder_segment_ids: Int[Array, "batch source"] | None = None,
        *,
        enable_dropout: bool = False,
    ) -> Float[Array, "batch source embed"]:
        """The encoder's output. Padding (0) is neither attended to nor meaningful."""
        is_token = encoder_input_tokens > 0
        allowed = _pairs(is_token, is_token)
        if encoder_segment_ids is not None:
            allowed &= _same_segment(encoder_segment_ids, encoder_segment_ids)
        has_own = self.config.has_source_embedder
        embedder = self.source_embedder if has_own else self.token_embedder
        embedded = embedder(encoder_input_tokens)
        return self.encoder(embedded, allowed, not enable_dropout)

    def decode(self, *args, **options) -> Float32[Array, "batch length vocab"]:
        """Logits of a whole target sequence, teacher-forced: of ``decode_states``."""
        return self.logits(self.decode_states(*args, **options))

    def decode_states(
        self,
        encoded: Float[Array, "batch source encoder_embed"],
        encoder_input_tokens: Int[Array, "batch source"],
        decoder_input_tokens: Int[Array, "batch length"],
        decoder_target_tokens: Int[Array, "batch length"],
        encoder_segment_ids: Int[Array, "batch source"] | None = None,
        decoder_segment_ids: Int[Array, "batch length"] | None = None,
        *,
        enable_dropout: bool = False,
    ) -> Float[Array, "batch length embed"]:
        """The decoder's normed states, which ``logits`` takes, of a whole target sequence."""
        is_target = decoder_target_tokens > 0
        length = decoder_input_tokens.shape[1]
        allowed = jnp.tril(jnp.ones((1, 1, length, length), bool)) & _pairs(is_target, is_target)
        cross_allowed = _pairs(is_target, encoder_input_tokens > 0)
        if encoder_segment_ids is not None:
            allowed &= _same_segment(decoder_segment_ids, decoder_segment_ids)
            cross_allowed &= _same_segment(decoder_segment_ids, encoder_segment_ids)
        embedded = self.token_embedder(decoder_input_tokens)
        return self.decoder(embedded, encoded, allowed, cross_allowed, not enable_dropout)

    def empty_cache(
        self, encoder_input_tokens: Int[Array, "batch source"], max_length: int
    ) -> DecoderCache:
        """Encodes the source and makes a cache for ``max_length`` decoder tokens."""
        encoded = self.encode(encoder_input_tokens)
        return self.decoder.empty_cache(encoded, encoder_input_tokens > 0, max_length)


def without_added(
    logits: Float32[Array, "batch length vocab"], config: NetworkConfig
) -> Float32[Array, "batch length vocab"]:
    """The logits with those of ``added_rows`` masked: none of them is ever written."""
    if not config.added_rows:
        return logits
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_added = (ids == PAD_ID) | (ids > config.vocab_size - config.added_rows)
    return jnp.where(is_added, MASKED, logits)


def embed(cfg: NetworkConfig) -> Embed:
    """The embedding of a network, which may be its output layer."""
    scales = cfg.input_scale, cfg.output_scale
    return Embed(cfg.vocab_size, cfg.emb_dim, cfg.dtype, *scales, cfg.image_end_id)


def _norm(cfg: NetworkConfig) -> RMSNorm:
    return cfg.norm(cfg.layer_norm_epsilon, cfg.dtype)


def _post_norm(cfg: NetworkConfig) -> RMSNorm | None:
    return _norm(cfg) if cfg.has_post_norms else None


def _attention(cfg: NetworkConfig, traits: Traits) -> Attention:
    return Attention(cfg.emb_dim, cfg.num_heads, cfg.head_dim, cfg.dropout_rate, cfg.dtype, traits)


def _mlp(cfg: NetworkConfig) -> Mlp:
    return Mlp(cfg.mlp_dim, cfg.mlp_activations, cfg.dropout_rate, cfg.dtype, cfg.use_bias)


def _relative_bias(cfg: NetworkConfig) -> RelativeBias:
    return RelativeBias(cfg.num_heads, cfg.relpos_num_buckets, cfg.relpos_max_distance)


def _shared_bias(cfg: NetworkConfig) -> RelativeBias | None:
    """The bias of all layers of a stack; None where there is none, or each has its own."""
    return _relative_bias(cfg) if cfg.has_relpos and not cfg.relpos_per_layer else None


def _with_bias(
    stack: Encoder | Decoder, bias_of: Callable[[RelativeBias | None, Traits], Any]
) -> Iterator[tuple[nn.Module, Any]]:
    """Each layer of a stack and its bias, which is made once for all layers that share it."""
    made = {}
    for number, layer in enumerate(stack.layers):
        traits = stack.config.attention_traits(number)
        if layer.relpos_bias is not None:
            yield layer, bias_of(layer.relpos_bias, traits)
            continue
        if traits not in made:
            made[traits] = bias_of(stack.relpos_bias, traits)
        yield layer, made[traits]


def _within(length: int, before: int, after: int) -> Bool[np.ndarray, "1 1 length length"]:
    """Which pairs of positions are at most so far apart; rows are queries."""
    positions = np.arange(length)
    distances = positions[:, None] - positions[None, :]
    return ((distances <= before) & (distances >= -after))[None, None]


def _pairs(
    queries: Bool[Array, "batch length"], keys: Bool[Array, "batch source"]
) -> Bool[Array, "batch 1 length source"]:
    return queries[:, None, :, None] & keys[:, None, None, :]


def _same_segment(
    queries: Int[Array, "batch length"], keys: Int[Array, "batch source"]
) -> Bool[Array, "batch 1 length source"]:
    return queries[:, None, :, None] == keys[:, None, None, :]
