"""The encoder-decoder of T5 1.0 and 1.1 (Flan, mT5, umT5, ByT5); T5Gemma uses its parts.

The parameter tree and its logical axes are those of T5X's ``examples/t5``. Families differ in
their configurations: norms, traits of attention, place of the source. ``encode`` and
``decode_states`` compute whole sequences (``__call__``, for training); ``extend`` feeds any number
of tokens to a static cache, each row at a separate position. *States* are
``[batch, length, embed]``.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_t5x.errors import InputError, check_choice, check_numbers, is_number
from spec_t5x.interfaces import Nodes
from spec_t5x.models import attention
from spec_t5x.models import cache as cache_lib
from spec_t5x.models.attention import Attention, NewTokens, PairBias, RelativeBias, Traits
from spec_t5x.models.cache import KVCache, LayerCache
from spec_t5x.models.layers import ACTIVATIONS, Dense, Embed, Mlp, RMSNorm, dropout
from spec_t5x.names import STORED_DTYPES
from spec_t5x.types import PAD_ID, Array, Bool, Float, Float32, Int

# Masks ``[batch, 1, length, source]`` of a query and a key: both are tokens, or both are equal.
_both = functools.partial(nn.make_attention_mask, dtype=bool)
_equal = functools.partial(nn.make_attention_mask, pairwise_fn=jnp.equal, dtype=bool)

# Largest setting, and number of layers: a damaged file must not exhaust the memory.
_MOST, _MOST_LAYERS = 2**31 - 1, 9999


class NetworkConfig:
    """Base class of network configurations, frozen dataclasses: validation and JSON."""

    # Whether the decoder attends to a source; if so, whether in one softmax with the text.
    has_source: ClassVar[bool] = True
    merges_source: ClassVar[bool] = False
    # Class of all norms; whether the output of each block is normed, as well as the input.
    norm: ClassVar[type[RMSNorm]] = RMSNorm
    has_post_norms: ClassVar[bool] = False
    # Whether all linear maps have biases.
    use_bias: ClassVar[bool] = False
    # Whether there are biases by relative position, and whether each layer has a separate one.
    has_relpos: ClassVar[bool] = True
    relpos_per_layer: ClassVar[bool] = False
    # Number of ids that no text contains: id 0, the start token, and the last ones.
    added_rows: ClassVar[int] = 0
    # Whether the encoder has a separate embedding.
    has_source_embedder: ClassVar[bool] = False
    # Factor by which embeddings are multiplied.
    input_scale: ClassVar[float] = 1.0
    # Bound that a tanh puts on the logits; 0 for none.
    logits_softcap: ClassVar[float] = 0.0

    @property
    def output_scale(self) -> float:
        """Factor by which logits are multiplied if the embedding is the output layer."""
        return self.emb_dim**-0.5

    @property
    def num_decoder_layers(self) -> int:
        """Number of decoder layers, which is ``num_layers`` if there is no encoder."""
        return self.num_layers

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys and values, by default those of queries."""
        return self.num_heads

    @property
    def of_encoder(self) -> "NetworkConfig":
        """Configuration of the encoder, by default the same."""
        return self

    def attention_traits(self, layer: int) -> Traits:
        """Returns the traits of self-attention in a layer, counted from 0."""
        return Traits(use_bias=self.use_bias)

    @property
    def source_traits(self) -> Traits:
        """Traits of the decoder's attention to the source."""
        return Traits(use_bias=self.use_bias)

    def embedder(self) -> Embed:
        """Makes the token embedding of a network, which may also be the output layer."""
        scales = self.input_scale, self.output_scale
        return Embed(self.vocab_size, self.emb_dim, self.dtype, *scales)

    def with_layers(self, *, encoder: Sequence[int], decoder: Sequence[int]):
        """Returns the configuration of a network with only these layers of each stack."""
        numbers = {"num_encoder_layers": len(encoder), "num_decoder_layers": len(decoder)}
        return dataclasses.replace(self, **numbers)

    def __post_init__(self):
        name = type(self).__name__
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                most = _MOST_LAYERS if field.name.endswith("layers") else _MOST
                check_numbers(int(field.default != 0), most, **{field.name: value})
            if field.type is float and not (is_number(value) and 0 <= value <= _MOST):
                raise InputError(f"{field.name} is {value!r}: give a number from 0 to {_MOST}")
            if field.type is bool and not isinstance(value, bool | np.bool_):
                raise InputError(f"{field.name} is {value!r}: give True or False")
            # gin and JSON give lists, which are not hashable, and JSON takes no numbers of NumPy.
            kind = tuple if isinstance(value, list) else field.type
            if kind in (tuple, int, float):
                object.__setattr__(self, field.name, kind(value))
        if self.has_relpos and not 1 < self.relpos_num_buckets // 2 < self.relpos_max_distance:
            raise InputError(
                f"relpos_max_distance is {self.relpos_max_distance} and relpos_num_buckets "
                f"{self.relpos_num_buckets}: give 4 buckets or more, and a distance over their half"
            )
        if not self.mlp_activations or not isinstance(self.mlp_activations, tuple):
            given = f"{name}.mlp_activations is {self.mlp_activations!r}"
            raise InputError(f"{given}: give a list of names, such as ('gelu', 'linear')")
        for activation in self.mlp_activations:
            check_choice(f"{name}.mlp_activations", activation, ACTIVATIONS)
        check_choice(f"{name}.dtype", self.dtype, STORED_DTYPES)

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as a dict of values that JSON can store."""
        values = dataclasses.asdict(self)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]):
        """Makes a configuration of ``to_dict``'s values; raises ``InputError`` for other names."""
        check_names(cls, values, cls.__name__.removesuffix("Config"))
        return cls(**values)


def check_names(cls: type, values: dict[str, Any], kind: str) -> None:
    """Raises ``InputError`` for an unknown ``kind`` setting: a name that is no field of ``cls``."""
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InputError(
            f"unknown {kind} setting {unknown[0]!r}: the known ones are {', '.join(sorted(known))}"
        )


@dataclasses.dataclass(frozen=True)
class T5Config(NetworkConfig):
    """Configuration of a T5; the defaults are those of T5 1.0 small."""

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
    # Type that layers compute in; parameters and logits are always float32.
    dtype: str = "float32"
    relpos_num_buckets: int = 32
    relpos_max_distance: int = 128
    # Whether each layer has a table (umT5, T5X's ``scalable_t5``) or all layers of a stack one.
    relpos_per_layer: bool = False
    # Above 0 for checkpoints whose special ids are not T5's (``data.mapped_vocabulary``).
    added_rows: int = 0
    layer_norm_epsilon: float = 1e-6


class Layer(nn.Module):
    """Base class of layers: blocks whose outputs are added to the states; feed-forward is last."""

    config: NetworkConfig
    number: int

    def setup(self):
        cfg = self.config
        self.relpos_bias = _relative_bias(cfg) if cfg.relpos_per_layer else None
        self.pre_mlp_layer_norm = _norm(cfg)
        self.mlp = Mlp(cfg.mlp_dim, cfg.mlp_activations, cfg.dropout_rate, cfg.dtype, cfg.use_bias)
        self.post_mlp_layer_norm = _post_norm(cfg)
        self.residual_dropout = dropout(cfg.dropout_rate)

    def add(self, states, update, norm: RMSNorm | None, deterministic: bool = True):
        """Returns states + a block's output ``update``, normed if there is a norm."""
        update = update if norm is None else norm(update)
        return states + self.residual_dropout(update, deterministic=deterministic)

    def feed_forward(self, states, deterministic: bool = True):
        """Returns states + the output of the feed-forward block."""
        update = self.mlp(self.pre_mlp_layer_norm(states), deterministic)
        return self.add(states, update, self.post_mlp_layer_norm, deterministic)


class SelfAttentionLayer(Layer):
    """Layer of an encoder: self-attention, then feed-forward."""

    def setup(self):
        super().setup()
        cfg = self.config
        self.pre_attention_layer_norm = _norm(cfg)
        self.attention = _attention(cfg, cfg.attention_traits(self.number))
        self.post_attention_layer_norm = _post_norm(cfg)

    def __call__(self, states, bias, deterministic):
        return self.feed_forward(self.attend(states, bias, deterministic), deterministic)

    def attend(self, states, bias, deterministic):
        """Returns states + self-attention over whole sequences."""
        normed = self.pre_attention_layer_norm(states)
        attended = self.attention.attend_to_itself(normed, bias, deterministic)
        return self.add(states, attended, self.post_attention_layer_norm, deterministic)


class DecoderLayer(Layer):
    """Layer of a decoder: causal self-attention, attention to a source if any, feed-forward."""

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
        """Attention that computes the source's keys and values."""
        return self.self_attention if self.config.merges_source else self.encoder_decoder_attention

    def __call__(self, inputs, encoded, bias, cross_bias, deterministic, earlier=()):
        """Computes the layer over whole sequences, teacher-forced.

        The softmax over ``inputs`` includes ``earlier``: pairs of other inputs and their bias.
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
        """Returns an empty cache of ``max_length`` positions, with the source's keys and values."""
        empty = cache_lib.zeros(self.config, encoded.shape[0], max_length)
        return LayerCache(empty, empty, *self.source_attention.keys_values(encoded))

    def extend(self, states, cache: LayerCache, tokens: NewTokens, cross_bias):
        """Computes the layer for new tokens; returns the tokens' states and the layer's cache."""
        states, cache = self.attend_to_cache(states, cache, tokens, cross_bias)
        if self.config.has_source and not self.config.merges_source:
            states = self.attend_to_source(states, cache, cross_bias)
        return self.feed_forward(states), cache

    def attend_to_cache(self, states, cache: LayerCache, tokens: NewTokens, cross_bias):
        """Returns states + self-attention (over a merged source, too), and the cache with them."""
        source = None
        if self.config.merges_source:
            source = cache.cross_keys, cache.cross_values, cross_bias
        normed = self.pre_self_attention_layer_norm(states)
        given = normed, cache, tokens, self.relpos_bias, source
        attended, cache = self.self_attention.extend(*given)
        return self.add(states, attended, self.post_self_attention_layer_norm), cache

    def attend_to_source(self, states, cache: LayerCache, cross_bias):
        """Returns new tokens' states + attention to the source."""
        source = cache.cross_keys, cache.cross_values, cross_bias
        normed = self.pre_cross_attention_layer_norm(states)
        attended = self.encoder_decoder_attention.attend(normed, source)
        return self.add(states, attended, self.post_cross_attention_layer_norm)


class Encoder(nn.Module):
    """Stack of encoder layers, from embedded tokens to normed states."""

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
    """Stack of decoder layers, from embedded tokens to normed states."""

    config: NetworkConfig
    # Layers, counted from 0, whose outputs are appended to the last layer's in the states.
    depths: Sequence[int] = ()

    def setup(self):
        cfg = self.config
        self.relpos_bias = _shared_bias(cfg)
        self.layers = [DecoderLayer(cfg, i) for i in range(cfg.num_decoder_layers)]
        self.decoder_norm = _norm(cfg)
        self.stack_dropout = dropout(cfg.dropout_rate)
        if not cfg.logits_via_embedding:
            # Logits are computed in float32 for stability, even if layers compute in bfloat16.
            self.logits_dense = Dense(cfg.vocab_size, ("embed", "vocab"))

    def __call__(self, embedded, encoded, allowed, cross_allowed, deterministic):
        states = self.stack_dropout(embedded, deterministic=deterministic)
        length, cross_bias = embedded.shape[1], attention.mask_bias(cross_allowed)

        def bias_of(relpos: RelativeBias | None, traits: Traits) -> Array:
            window = traits.window
            seen = allowed if window is None else allowed & _within(length, window - 1, length)
            mask = attention.mask_bias(seen)
            return mask if relpos is None else relpos.full(length, False) + mask

        outputs = []
        for layer, bias in _with_bias(self, bias_of):
            states = layer(states, encoded, bias, cross_bias, deterministic)
            outputs.append(states)
        return self.stack_dropout(self._normed(outputs), deterministic=deterministic)

    def _normed(self, outputs: Sequence[Array]) -> Array:
        """Returns the last output, normed, and those of ``depths``, normed without a scale."""
        normed = self.decoder_norm(outputs[-1])
        if not self.depths:
            return normed
        plain = RMSNorm(self.config.layer_norm_epsilon, self.config.dtype, parent=None)
        ones = {"params": {"scale": jnp.ones(normed.shape[-1])}}
        others = [plain.apply(ones, outputs[depth]) for depth in self.depths]
        return jnp.concatenate([normed, *others], axis=-1)

    def empty_cache(self, encoded, source_mask, max_length: int) -> KVCache:
        layers = tuple(layer.empty_cache(encoded, max_length) for layer in self.layers)
        return KVCache(layers, jnp.zeros(encoded.shape[0], jnp.int32), source_mask)

    def extend(self, embedded, cache: KVCache, bidirectional=None):
        new = embedded.shape[1]
        tokens = attention.after_texts(cache, new, self.relpos_bias, bidirectional)
        states, extended = self._extend(embedded, cache, tokens)
        return states, extended.at(cache.lengths + new)

    def extend_nodes(self, embedded, cache: KVCache, nodes: Nodes):
        return self._extend(embedded, cache, attention.in_slots(nodes, self.relpos_bias))

    def _extend(self, states, cache: KVCache, tokens: NewTokens):
        cross_bias = None
        if self.config.has_source:
            cross_bias = attention.mask_bias(cache.source_mask)[:, None, None, :]
        outputs, cache = cache.through(self.layers, states, tokens, cross_bias)
        return self._normed(outputs), cache


class CachedNetwork(nn.Module):
    """Network over a static cache, with a ``token_embedder`` and a ``decoder``."""

    config: NetworkConfig
    # Decoder layers, counted from 0, whose outputs are appended to the last layer's in the states,
    # for a draft that is fed these states.
    depths: tuple[int, ...] = ()

    def extend(
        self,
        cache: KVCache,
        tokens: Int[Array, "batch new"],
        bidirectional: Bool[Array, "batch new"] | None = None,
    ) -> tuple[Float[Array, "batch new embed"], KVCache]:
        """Feeds ``tokens[b]`` to the decoder from position ``cache.lengths[b]`` on.

        Returns the normed states after each token, the argument of ``logits``, and the cache with
        ``new`` tokens more, for which it must have room. See ``attention.after_texts``.
        """
        return self.decoder.extend(self.token_embedder(tokens), cache, bidirectional)

    def extend_nodes(
        self, cache: KVCache, nodes: Nodes
    ) -> tuple[Float[Array, "batch nodes embed"], KVCache]:
        """Feeds tokens to the slots of ``nodes``; returns normed states after each, and cache."""
        return self.decoder.extend_nodes(self.token_embedder(nodes.tokens), cache, nodes)

    def logits(
        self, states: Float[Array, "batch length embed"]
    ) -> Float32[Array, "batch length vocab"]:
        """Returns the logits of normed states; of states with ``depths``, the last layer's."""
        states = states[..., : self.config.emb_dim]
        if self.config.logits_via_embedding:
            logits = self.token_embedder.attend(states)
        else:
            logits = self.decoder.logits_dense(states)
        cap = self.config.logits_softcap
        return without_added(cap * jnp.tanh(logits / cap) if cap else logits, self.config)


class Transformer(CachedNetwork):
    """Encoder-decoder network, over whole sequences or over a cache."""

    config: NetworkConfig

    def setup(self):
        cfg = self.config
        self.token_embedder = cfg.embedder()
        if cfg.has_source_embedder:
            self.source_embedder = cfg.of_encoder.embedder()
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
        """Returns the logits at each position of the targets, given earlier tokens (training).

        Dropout draws from the ``dropout`` rng stream. ``decoder_target_tokens``
        only mask padding; segment ids keep packed examples apart.
        """
        source, dropped = encoder_input_tokens, {"enable_dropout": enable_dropout}
        encoded = self.encode(source, encoder_segment_ids, **dropped)
        tokens = decoder_input_tokens, decoder_target_tokens
        segments = encoder_segment_ids, decoder_segment_ids
        return self.logits(self.decode_states(encoded, source, *tokens, *segments, **dropped))

    def encode(
        self,
        encoder_input_tokens: Int[Array, "batch source"],
        encoder_segment_ids: Int[Array, "batch source"] | None = None,
        *,
        enable_dropout: bool = False,
    ) -> Float[Array, "batch source embed"]:
        """Returns the encoder's states; padding (0) is masked, and its states are undefined."""
        is_token = encoder_input_tokens > 0
        allowed = _both(is_token, is_token)
        if encoder_segment_ids is not None:
            allowed &= _equal(encoder_segment_ids, encoder_segment_ids)
        embedder = self.source_embedder if self.config.has_source_embedder else self.token_embedder
        return self.encoder(embedder(encoder_input_tokens), allowed, not enable_dropout)

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
        """Returns the decoder's normed states of whole sequences, teacher-forced."""
        is_target = decoder_target_tokens > 0
        length = decoder_input_tokens.shape[1]
        allowed = jnp.tril(jnp.ones((1, 1, length, length), bool))
        allowed &= _both(is_target, is_target)
        cross_allowed = _both(is_target, encoder_input_tokens > 0)
        if encoder_segment_ids is not None:
            allowed &= _equal(decoder_segment_ids, decoder_segment_ids)
            cross_allowed &= _equal(decoder_segment_ids, encoder_segment_ids)
        embedded = self.token_embedder(decoder_input_tokens)
        return self.decoder(embedded, encoded, allowed, cross_allowed, not enable_dropout)

    def empty_cache(
        self, encoder_input_tokens: Int[Array, "batch source"], max_length: int
    ) -> KVCache:
        """Returns an empty cache of ``max_length`` positions, with the source encoded."""
        encoded = self.encode(encoder_input_tokens)
        return self.decoder.empty_cache(encoded, encoder_input_tokens > 0, max_length)


def without_added(
    logits: Float32[Array, "batch length vocab"], config: NetworkConfig
) -> Float32[Array, "batch length vocab"]:
    """Returns logits with ``MASKED`` for the ids of ``added_rows``, which are never generated."""
    if not config.added_rows:
        return logits
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_added = (ids == PAD_ID) | (ids > config.vocab_size - config.added_rows)
    return jnp.where(is_added, attention.MASKED, logits)


def _norm(cfg: NetworkConfig) -> RMSNorm:
    return cfg.norm(cfg.layer_norm_epsilon, cfg.dtype)


def _post_norm(cfg: NetworkConfig) -> RMSNorm | None:
    return _norm(cfg) if cfg.has_post_norms else None


def _attention(cfg: NetworkConfig, traits: Traits) -> Attention:
    return Attention(cfg.emb_dim, cfg.num_heads, cfg.head_dim, cfg.dropout_rate, cfg.dtype, traits)


def _relative_bias(cfg: NetworkConfig) -> RelativeBias:
    return RelativeBias(cfg.num_heads, cfg.relpos_num_buckets, cfg.relpos_max_distance)


def _shared_bias(cfg: NetworkConfig) -> RelativeBias | None:
    """Makes the relative bias that all layers of a stack share; returns None if they share none."""
    return _relative_bias(cfg) if cfg.has_relpos and not cfg.relpos_per_layer else None


def _with_bias(
    stack: Encoder | Decoder, bias_of: Callable[[RelativeBias | None, Traits], Any]
) -> Iterator[tuple[nn.Module, Any]]:
    """Yields each layer of a stack and the layer's bias, which layers of equal traits may share."""
    made = {}
    for number, layer in enumerate(stack.layers):
        traits, relpos = stack.config.attention_traits(number), layer.relpos_bias
        key = traits if relpos is None else number
        if key not in made:
            made[key] = bias_of(relpos or stack.relpos_bias, traits)
        yield layer, made[key]


def _within(length: int, before: int, after: int) -> Bool[np.ndarray, "1 1 length length"]:
    """Returns the mask of keys at most ``before`` before or ``after`` after a query, by query."""
    positions = np.arange(length)
    distances = positions[:, None] - positions[None, :]
    return ((distances <= before) & (distances >= -after))[None, None]
