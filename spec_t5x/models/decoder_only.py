"""A decoder-only T5: T5's decoder without a source, as a causal or a prefix language model.

The parameter tree and its logical axes are those of T5X's ``examples/decoder_only``. In a
prefix language model the tokens of the prompt attend to one another in both directions
(Raffel et al. 2020, section 3.2.1).
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.models.cache import KVCache
from spec_t5x.models.cached_model import TextModel
from spec_t5x.models.layers import Embed
from spec_t5x.models.t5 import CachedNetwork, Decoder, NetworkConfig
from spec_t5x.types import PAD_ID, Array, Float32, Int, PyTree


@dataclasses.dataclass(frozen=True)
class DecoderOnlyConfig(NetworkConfig):
    """Configuration of a decoder-only T5, with T5X's names."""

    vocab_size: int = 32128
    emb_dim: int = 512
    num_heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 2048
    num_layers: int = 6
    mlp_activations: Sequence[str] = ("relu",)
    logits_via_embedding: bool = False
    dropout_rate: float = 0.1
    # Type that layers compute in; parameters and logits are always float32.
    dtype: str = "float32"

    has_source: ClassVar[bool] = False
    # Constants of T5X's example.
    relpos_num_buckets: ClassVar[int] = 32
    relpos_max_distance: ClassVar[int] = 128
    layer_norm_epsilon: ClassVar[float] = 1e-6


class _Decoder(Decoder):
    """T5's decoder with the embedding inside, where T5X has it."""

    def setup(self):
        super().setup()
        self.token_embedder = self.config.embedder()


class DecoderOnlyTransformer(CachedNetwork):
    """Decoder-only T5 over a static cache."""

    config: DecoderOnlyConfig

    def setup(self):
        self.decoder = _Decoder(self.config)

    @property
    def token_embedder(self) -> Embed:
        """The decoder's embedding."""
        return self.decoder.token_embedder

    def __call__(
        self, cache: KVCache, tokens: Int[Array, "batch new"]
    ) -> Float32[Array, "batch new vocab"]:
        """Returns the logits after new tokens; ``init`` calls this to create all parameters."""
        return self.logits(self.extend(cache, tokens)[0])


@flax.struct.dataclass
class DecoderOnlyModel(TextModel):
    """Decoder-only T5 that scores tokens against a static cache, with T5X's parameters."""

    network = DecoderOnlyTransformer
    # Whether a prompt's tokens attend to one another in both directions.
    prefix_lm: bool = flax.struct.field(pytree_node=False, default=False, kw_only=True)

    def read_prompts(self, cache: KVCache, prompts: Int[Array, "batch width"]) -> KVCache:
        """Feeds ``prompts`` to an empty cache, bidirectionally if ``prefix_lm``; returns it."""
        if not self.prefix_lm:
            return super().read_prompts(cache, prompts)
        known = jnp.pad(prompts[:, 1:] != PAD_ID, ((0, 0), (1, 0)), constant_values=True)
        return self.apply(cache, prompts, known, method="extend")[1]


def init_variables(module: DecoderOnlyTransformer, rng: jax.Array) -> PyTree:
    """Returns initial variables of a network, ``params`` and ``params_axes``."""
    cache = KVCache.empty(module.config, 1, 1)
    return module.init(rng, cache, jnp.zeros((1, 1), jnp.int32))
