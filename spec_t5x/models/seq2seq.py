"""A T5 and its parameters, bound together as the loops' ``Target``."""

import flax.struct
import jax.numpy as jnp

from spec_t5x.errors import InputError
from spec_t5x.models.cache import KVCache, RoundedHeads
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.t5 import Transformer
from spec_t5x.names import AUTO
from spec_t5x.types import Array, Int


@flax.struct.dataclass
class T5Model(CachedModel):
    """Encoder-decoder T5 that scores tokens against a static cache."""

    network = Transformer

    def showing(self, depths: tuple[int, ...]) -> "T5Model":
        """Returns a model whose states also have the outputs of decoder layers ``depths``, from 0.

        Raises ``InputError`` if the decoder lacks one of these layers.
        """
        if not all(0 <= depth < self.num_layers for depth in depths):
            raise InputError(
                f"a draft reads the states of layers {list(depths)}, the decoder has "
                f"{self.num_layers} layers: choose layers from 0 to {self.num_layers - 1}"
            )
        return self.replace(module=self.module.clone(depths=tuple(depths)))

    def prefill(
        self,
        inputs: Int[Array, "batch source"],
        max_length: int,
        prompts: Int[Array, "batch width"] | None = None,
    ) -> KVCache:
        """Returns a cache of ``max_length`` positions, with sources encoded and prompts fed.

        The last column of ``prompts`` is not fed: decoding starts with each row's last token.
        """
        # The encoder may skip padding after the longest source: nothing attends to it.
        places = jnp.arange(1, inputs.shape[1] + 1, dtype=jnp.int32)
        longest = jnp.max(jnp.where(inputs > 0, places, 0))
        cache = self.first(longest).apply(inputs, max_length, method="empty_cache")
        if self.kv != AUTO:
            cache = cache.map(RoundedHeads.of, ("cross_keys", "cross_values"))
        return cache if prompts is None else self.score(cache, prompts[:, :-1])[2]
