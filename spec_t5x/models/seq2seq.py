"""A T5 and its parameters, bound together as the loops' ``Target``."""

import flax.struct
import jax.numpy as jnp

from spec_t5x.errors import InputError
from spec_t5x.models.cache import DecoderCache
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.t5 import Transformer
from spec_t5x.types import Array, Int


@flax.struct.dataclass
class T5Model(CachedModel):
    """An encoder-decoder T5 that scores tokens against a static cache."""

    network = Transformer

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return self.config.num_decoder_layers

    def showing(self, depths: tuple[int, ...]) -> "T5Model":
        """The same model, with the outputs of these decoder layers, from 0, behind its states.

        Raises:
          InputError: layers that the decoder does not have.
        """
        if not all(0 <= depth < self.num_layers for depth in depths):
            raise InputError(
                f"the states of layers {list(depths)} are wanted of a decoder of "
                f"{self.num_layers}: give some of 0..{self.num_layers - 1}"
            )
        return self.replace(module=self.module.clone(depths=tuple(depths)))

    def prefill(
        self,
        inputs: Int[Array, "batch source"],
        max_length: int,
        prompts: Int[Array, "batch width"] | None = None,
    ) -> DecoderCache:
        """Encodes the source; the cache has room for ``max_length`` tokens, and the prompts' in it.

        All but the last of each prompt, which decoding starts with.
        """
        # Nothing attends to what is padding of all rows.
        places = jnp.arange(1, inputs.shape[1] + 1, dtype=jnp.int32)
        longest = jnp.max(jnp.where(inputs > 0, places, 0))
        cache = self.first(longest).apply(inputs, max_length, method="empty_cache")
        return cache if prompts is None else self.score(cache, prompts[:, :-1])[2]
