"""T5Gemma and T5Gemma 2 (text): encoder-decoders made of Gemma 2 and Gemma 3.

Zhang et al. 2025 (arXiv 2504.06225; T5Gemma 2: arXiv 2512.14856). The network is ``models.t5``'s
with rotary positions, grouped-query attention, norms before and after each block, and *local*
layers, which attend within a window, between *global* ones, which attend to the whole text. T5Gemma
soft-caps attention scores and logits; T5Gemma 2 instead norms queries and keys, and its decoder
attends to text and source in one softmax, with one set of maps.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.models.attention import Traits
from spec_t5x.models.binding import Family
from spec_t5x.models.layers import Embed, GemmaNorm, RMSNorm
from spec_t5x.models.logical_axes import constrain, param_with_axes
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import NetworkConfig
from spec_t5x.types import Array, Float, Int

# Kinds of layers: attention within a window, or to the whole text.
LOCAL, GLOBAL = "local", "global"
# Sizes that may differ between encoder and decoder.
_OF_ENCODER = ("emb_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "query_scalar")


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Positions as rotations of queries and keys (RoPE, Su et al. 2021, arXiv 2104.09864).

    Features i and i + head_dim / 2 turn by ``position / factor * base ** (-2 i / head_dim)``.
    """

    base: float = 10_000.0
    factor: float = 1.0

    def __call__(
        self,
        heads: Float[Array, "batch heads length head_dim"],
        positions: Int[Array, "#batch length"],
    ) -> Float[Array, "batch heads length head_dim"]:
        """Returns queries or keys rotated by their positions; angles are computed in float32."""
        width = heads.shape[-1]
        frequencies = self.base ** -(np.arange(0, width, 2, dtype=np.float32) / width) / self.factor
        frequencies = frequencies.astype(np.float32)[None, None, None]
        angles = positions[:, None, :, None].astype(jnp.float32) * frequencies
        cos, sin = jnp.cos(angles).astype(heads.dtype), jnp.sin(angles).astype(heads.dtype)
        first, second = jnp.split(heads, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class ImageEmbed(Embed):
    """Token embedding in which the token that ends an image has a separate parameter."""

    image_end_id: int = 0

    def setup(self):
        super().setup()
        init = nn.initializers.zeros
        self.image_end = param_with_axes(self, "image_end", init, (self.features,), ("embed",))

    def __call__(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length embed"]:
        is_end = (tokens == self.image_end_id)[..., None]
        image_end = self.image_end.astype(self.dtype)[None, None, :]
        embedded = jnp.where(is_end, image_end, super().__call__(tokens))
        return constrain(embedded, ("batch", "length", "embed"))


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig(NetworkConfig):
    """Sizes of a T5Gemma or T5Gemma 2; by default those of T5Gemma s-s."""

    vocab_size: int = 256128
    emb_dim: int = 512
    num_heads: int = 8
    # Number of heads of keys and values, which divides ``num_heads``.
    num_kv_heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 1024
    num_encoder_layers: int = 8
    num_decoder_layers: int = 8
    # Attention scores are divided by the square root of this number.
    query_scalar: int = 64
    # Sizes of the encoder; 0 takes the decoder's.
    encoder_emb_dim: int = 0
    encoder_num_heads: int = 0
    encoder_num_kv_heads: int = 0
    encoder_head_dim: int = 0
    encoder_mlp_dim: int = 0
    encoder_query_scalar: int = 0
    # Kinds ("local", "global") of the first layers; the sequence is repeated for the others.
    layer_kinds: Sequence[str] = (LOCAL, GLOBAL)
    encoder_layer_kinds: Sequence[str] = (LOCAL, GLOBAL)
    # Local layers: number of positions that a decoder token attends to, its own included, and
    # numbers of positions before and after its own that an encoder token attends to.
    window: int = 4096
    encoder_reach: Sequence[int] = (4095, 4095)
    # (base, factor) of the rotary positions in local and in global layers (``Rotary``).
    local_rotary: Sequence[float] = (10_000.0, 1.0)
    global_rotary: Sequence[float] = (10_000.0, 1.0)
    # Soft caps of attention scores and of logits; 0 for none.
    attention_softcap: float = 50.0
    logits_softcap: float = 30.0
    # T5Gemma 2: norms of queries and keys, one attention to text and source, one embedding for
    # both, and the id of the token that ends an image, which has a separate embedding (0: none).
    has_head_norms: bool = False
    merges_source: bool = False
    has_source_embedder: bool = True
    image_end_id: int = 0
    mlp_activations: Sequence[str] = ("gelu", "linear")
    # If True, the output layer is the token embedding.
    logits_via_embedding: bool = True
    dropout_rate: float = 0.0
    # Type that the layers compute in; parameters and logits are float32.
    dtype: str = "float32"
    # Rows beyond the checkpoint's ids, if its special ids are not T5's (``mapped_vocabulary``).
    added_rows: int = 0
    layer_norm_epsilon: float = 1e-6

    norm: ClassVar[type[RMSNorm]] = GemmaNorm
    has_post_norms: ClassVar[bool] = True
    has_relpos: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("layer_kinds", "encoder_layer_kinds"):
            kinds = getattr(self, name)
            if not kinds or set(kinds) - {LOCAL, GLOBAL}:
                raise InputError(f"T5GemmaConfig.{name} is {kinds}: list {LOCAL} and {GLOBAL}")
        encoder = self._encoder_sizes
        for sizes in (vars(self), encoder):
            if sizes["num_heads"] % sizes["num_kv_heads"]:
                raise InputError(
                    f"T5GemmaConfig has {sizes['num_heads']} heads of queries and "
                    f"{sizes['num_kv_heads']} of keys: the latter must divide the former"
                )
        shares = self.merges_source or not self.has_source_embedder
        if shares and encoder["emb_dim"] != self.emb_dim:
            raise InputError(
                f"T5GemmaConfig.encoder_emb_dim is {self.encoder_emb_dim} and emb_dim "
                f"{self.emb_dim}: give the same, as encoder and decoder share parts"
            )

    @property
    def of_encoder(self) -> "T5GemmaConfig":
        """Configuration whose sizes, kinds of layers and windows are the encoder's."""
        return _EncoderConfig(**vars(self) | self._encoder_sizes)

    @property
    def _encoder_sizes(self) -> dict[str, int]:
        return {name: getattr(self, f"encoder_{name}") or vars(self)[name] for name in _OF_ENCODER}

    @property
    def input_scale(self) -> float:
        """Factor of the input embeddings: ``sqrt(emb_dim)``."""
        return self.emb_dim**0.5

    @property
    def output_scale(self) -> float:
        """Factor of the states before a tied output layer: 1, unlike T5's."""
        return 1.0

    def embedder(self) -> Embed:
        """Makes the token embedding, with that of an image's end if there is such a token."""
        if not self.image_end_id:
            return super().embedder()
        sizes = self.vocab_size, self.emb_dim, self.dtype, self.input_scale, self.output_scale
        return ImageEmbed(*sizes, self.image_end_id)

    @property
    def source_traits(self) -> Traits:
        """Traits of attention to the source, which has neither rotary positions nor a window."""
        return Traits(
            num_kv_heads=self.num_kv_heads,
            scale=self.query_scalar**-0.5,
            softcap=self.attention_softcap,
            head_norm=self.layer_norm_epsilon if self.has_head_norms else None,
        )

    def attention_traits(self, layer: int) -> Traits:
        """Returns the traits of self-attention in decoder layer ``layer``, counted from 0."""
        return self._traits(_kind(self.layer_kinds, layer), window=self.window)

    def _traits(self, kind: str, **seen) -> Traits:
        if kind == LOCAL:
            rotate = Rotary(*self.local_rotary)
            return dataclasses.replace(self.source_traits, rotate=rotate, **seen)
        return dataclasses.replace(self.source_traits, rotate=Rotary(*self.global_rotary))

    def with_layers(self, *, encoder: Sequence[int], decoder: Sequence[int]) -> "T5GemmaConfig":
        """Returns the configuration of only these layers, which keep their kinds."""
        return dataclasses.replace(
            super().with_layers(encoder=encoder, decoder=decoder),
            layer_kinds=tuple(_kind(self.layer_kinds, layer) for layer in decoder),
            encoder_layer_kinds=tuple(_kind(self.encoder_layer_kinds, layer) for layer in encoder),
        )


class _EncoderConfig(T5GemmaConfig):
    """Configuration with the encoder's sizes; local layers attend to both sides."""

    def attention_traits(self, layer: int) -> Traits:
        return self._traits(_kind(self.encoder_layer_kinds, layer), reach=self.encoder_reach)


def _kind(kinds: Sequence[str], layer: int) -> str:
    return kinds[layer % len(kinds)]


def _gemma(emb_dim, num_heads, num_kv_heads, head_dim, mlp_dim, layers, **more) -> T5GemmaConfig:
    sizes = {
        "vocab_size": 256000,
        "emb_dim": emb_dim,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "mlp_dim": mlp_dim,
        "num_encoder_layers": layers,
        "num_decoder_layers": layers,
        "query_scalar": head_dim,
    }
    return T5GemmaConfig(**sizes | more)


_9B_ENCODER = {
    "encoder_emb_dim": 3584,
    "encoder_num_heads": 16,
    "encoder_num_kv_heads": 8,
    "encoder_mlp_dim": 14336,
    "num_encoder_layers": 42,
}
_T5GEMMA = {
    "s_s": _gemma(512, 8, 8, 64, 1024, 8),
    "b_b": _gemma(768, 12, 12, 64, 2048, 12),
    "l_l": _gemma(1024, 16, 16, 64, 2816, 24),
    "ml_ml": _gemma(1152, 4, 4, 256, 6912, 26),
    "xl_xl": _gemma(2048, 32, 32, 64, 5120, 24),
    "2b_2b": _gemma(2304, 8, 4, 256, 9216, 26),
    "9b_2b": _gemma(2304, 8, 4, 256, 9216, 26, **_9B_ENCODER),
    "9b_9b": _gemma(3584, 16, 8, 256, 14336, 42),
}


def _gemma2(*sizes, window: int, factor: float = 1.0) -> T5GemmaConfig:
    """Returns a T5Gemma 2's configuration, with five local layers before each global one."""
    return _gemma(
        *sizes,
        vocab_size=262144,
        layer_kinds=(LOCAL,) * 5 + (GLOBAL,),
        encoder_layer_kinds=(LOCAL,) * 5 + (GLOBAL,),
        window=window,
        encoder_reach=((window - 1) // 2, window // 2),
        global_rotary=(1_000_000.0, factor),
        attention_softcap=0.0,
        logits_softcap=0.0,
        has_head_norms=True,
        merges_source=True,
        has_source_embedder=False,
    )


_T5GEMMA2 = {
    "270m": _gemma2(640, 4, 1, 256, 2048, 18, window=512),
    "1b": _gemma2(1152, 4, 1, 256, 6912, 26, window=512),
    "4b": _gemma2(2560, 8, 4, 256, 10240, 34, window=1024, factor=8.0),
}

FAMILY = Family(
    config=T5GemmaConfig,
    model=T5Model,
    sizes={
        **{f"t5gemma_{name}": config for name, config in _T5GEMMA.items()},
        **{f"t5gemma2_{name}": config for name, config in _T5GEMMA2.items()},
    },
)
