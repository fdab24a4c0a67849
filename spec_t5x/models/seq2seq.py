"""A T5 and its parameters, bound together as the loops' ``Target``."""

import flax.struct
import jax

from spec_t5x.interfaces import Nodes
from spec_t5x.machine.cpu_kernels import calls as cpu_kernels
from spec_t5x.models.cache import DecoderCache, DecoderOnlyCache
from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.types import Array, Float, Float32, Int, PyTree

# A text can be rolled back without its source.
AnyCache = DecoderCache | DecoderOnlyCache


@flax.struct.dataclass
class T5Model:
    """An encoder-decoder T5 that scores tokens against a static cache.

    A pytree whose leaves are the parameters, so that it is passed into compiled
    functions. Serves as a target, and as the model inside a ``TransformerDraft``.
    """

    params: PyTree
    module: Transformer = flax.struct.field(pytree_node=False)
    # Whether decoder steps go through the CPU kernels (``cpu_kernels``).
    kernels: bool = flax.struct.field(pytree_node=False, default=False)

    @classmethod
    def create(cls, params: PyTree, config: T5Config) -> "T5Model":
        """Binds a parameter tree (T5X's names) to its configuration."""
        params = jax.tree.map(jax.numpy.asarray, params)
        return cls(params, Transformer(config), kernels=cpu_kernels.suit(params))

    @property
    def config(self) -> T5Config:
        """The sizes of the network."""
        return self.module.config

    @property
    def vocab_size(self) -> int:
        """Number of logits, padding of the vocabulary included."""
        return self.config.vocab_size

    def prefill(self, inputs: Int[Array, "batch source"], max_length: int) -> DecoderCache:
        """Encodes the source; the cache has room for ``max_length`` tokens."""
        return self._apply(inputs, max_length, method=Transformer.empty_cache)

    def score(
        self, cache: DecoderCache, tokens: Int[Array, "batch new"]
    ) -> tuple[Float32[Array, "batch new vocab"], DecoderCache]:
        """Feeds new tokens at each row's length: logits after each, longer cache."""
        return self._apply(cache, tokens, method=Transformer.extend)

    @property
    def state_size(self) -> int:
        """Width of a decoder state."""
        return self.config.emb_dim

    def score_states(
        self, cache: DecoderCache, tokens: Int[Array, "batch new"]
    ) -> tuple[Float32[Array, "batch new vocab"], Float[Array, "batch new embed"], DecoderCache]:
        """``score``, with the normed decoder states that the logits were made from."""
        return self._apply(cache, tokens, method=Transformer.extend_states)

    @property
    def scores_parts(self) -> bool:
        """By the kernels, which are told how much of a block counts."""
        return self.kernels

    def score_part(
        self, cache: DecoderCache, tokens: Int[Array, "batch new"], num: Int[Array, ""]
    ) -> tuple[Float32[Array, "batch new vocab"], Float[Array, "batch new embed"], DecoderCache]:
        """``score_states`` of the first ``num`` tokens of each row; the rest means nothing."""
        with cpu_kernels.using_first(num):
            return self.score_states(cache, tokens)

    def num_slots(self, cache: DecoderCache) -> int:
        """How many tokens of a row the cache has room for."""
        return cache.max_length

    def score_nodes(
        self, cache: DecoderCache, nodes: Nodes
    ) -> tuple[Float32[Array, "batch nodes vocab"], DecoderCache]:
        """Feeds tokens of a tree to their slots: logits after each, written cache."""
        logits, _, cache = self.score_node_states(cache, nodes)
        return logits, cache

    def score_node_states(
        self, cache: DecoderCache, nodes: Nodes
    ) -> tuple[
        Float32[Array, "batch nodes vocab"], Float[Array, "batch nodes embed"], DecoderCache
    ]:
        """``score_nodes``, with the decoder states that the logits were made from."""
        return self._apply(cache, nodes, method=Transformer.extend_nodes)

    def move(
        self, cache: AnyCache, slots: Int[Array, "batch nodes"], starts: Int[Array, "batch"]
    ) -> AnyCache:
        """The cache with the contents of ``slots`` copied to the slots from ``starts`` on."""
        return cache.move(slots, starts)

    def rollback(self, cache: AnyCache, lengths: Int[Array, "batch"]) -> AnyCache:
        """The cache with each row's length set to ``lengths``."""
        return cache.at(lengths)

    def _apply(self, *args, method):
        with cpu_kernels.using(self.kernels):
            return self.module.apply({"params": self.params}, *args, method=method)
