"""A network over a static cache and its parameters, bound together as the loops' ``Target``."""

from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.interfaces import Nodes
from spec_t5x.machine.cpu_kernels import calls as cpu_kernels
from spec_t5x.models import weights as weights_lib
from spec_t5x.models.cache import Cache, DecoderOnlyCache
from spec_t5x.models.logical_axes import constrain
from spec_t5x.types import Array, Float, Float32, Int, PyTree


@flax.struct.dataclass
class CachedModel:
    """Scores tokens against a cache; ``T5Model`` and ``GPTModel`` say how one begins.

    A pytree whose leaves are the weights, so that it is passed into compiled
    functions. Serves as a target, and as the model inside a ``TransformerDraft``.
    """

    # The parameters; with ``kernels`` as the CPU kernels read them (``models.weights``).
    weights: PyTree
    # Has a ``config``, ``extend``, ``extend_nodes`` and ``logits``.
    module: nn.Module = flax.struct.field(pytree_node=False)
    # Whether decoder steps go through the CPU kernels (``cpu_kernels``).
    kernels: bool = flax.struct.field(pytree_node=False, default=False)
    # Whether ``score`` writes to the cache of another model, whose layout it keeps.
    in_targets_cache: bool = flax.struct.field(pytree_node=False, default=False)

    # What ``create`` makes of a configuration.
    network: ClassVar[type[nn.Module]]

    @classmethod
    def create(cls, params: PyTree, config: Any) -> "CachedModel":
        """Binds a parameter tree (T5X's names) to its configuration."""
        module = cls.network(config)
        weights, kernels = _ready(params, module)
        return cls(weights, module, kernels=kernels)

    def with_params(self, params: PyTree) -> "CachedModel":
        """The same with other parameters."""
        weights, kernels = _ready(params, self.module)
        return self.replace(weights=weights, kernels=kernels)

    def rounded(self, bits: int = 8) -> "CachedModel":
        """The same with its matrices in 8 or 4 bits: another model, close to this one."""
        tied = self.config.logits_via_embedding
        return self.replace(weights=weights_lib.rounded(self.weights, bits, tied=tied))

    @property
    def params(self) -> PyTree:
        """The parameters as they were given."""
        return weights_lib.unpack(self.weights) if self.kernels else self.weights

    @property
    def config(self) -> Any:
        """The sizes of the network."""
        return self.module.config

    @property
    def vocab_size(self) -> int:
        """Number of logits, padding of the vocabulary included."""
        return self.config.vocab_size

    @property
    def state_size(self) -> int:
        """Width of a decoder state."""
        return self.config.emb_dim * (1 + len(getattr(self.module, "depths", ())))

    def score(
        self, cache: Cache, tokens: Int[Array, "batch new"]
    ) -> tuple[Float32[Array, "batch new vocab"], Cache]:
        """Feeds new tokens at each row's length: logits after each, longer cache."""
        logits, _, cache = self.score_states(cache, tokens)
        return logits, cache.laid_out() if self.in_targets_cache else cache

    def score_states(
        self, cache: Cache, tokens: Int[Array, "batch new"]
    ) -> tuple[Float32[Array, "batch new vocab"], Float[Array, "batch new embed"], Cache]:
        """``score``, with the normed states that the logits were made from."""
        return self._extended("extend", cache, tokens)

    @property
    def scores_parts(self) -> bool:
        """Whether ``score_part`` saves time: with the kernels, which skip the rest of a block."""
        return self.kernels

    def score_part(
        self, cache: Cache, tokens: Int[Array, "batch new"], num: Int[Array, ""]
    ) -> tuple[Float32[Array, "batch new vocab"], Float[Array, "batch new embed"], Cache]:
        """``score_states`` of the first ``num`` tokens of each row; the rest means nothing."""
        with cpu_kernels.using_first(num):
            return self.score_states(cache, tokens)

    def num_slots(self, cache: Cache) -> int:
        """How many tokens of a row the cache has room for."""
        return cache.max_length

    def score_nodes(
        self, cache: Cache, nodes: Nodes
    ) -> tuple[Float32[Array, "batch nodes vocab"], Cache]:
        """Feeds tokens of a tree to their slots: logits after each, written cache."""
        logits, _, cache = self.score_node_states(cache, nodes)
        return logits, cache

    def score_node_states(
        self, cache: Cache, nodes: Nodes
    ) -> tuple[Float32[Array, "batch nodes vocab"], Float[Array, "batch nodes embed"], Cache]:
        """``score_nodes``, with the states that the logits were made from."""
        return self._extended("extend_nodes", cache, nodes)

    def logits(self, states: Float[Array, "batch new embed"]) -> Float32[Array, "batch new vocab"]:
        """Of normed states; on a mesh, the vocabulary is gathered once, here.

        What samples takes maxima, sums and single tokens of it, each of which would be
        a collective of its own, and sums in parts would round otherwise.
        """
        return constrain(self.apply(states, method="logits"), ("batch", "length", None))

    def move(
        self, cache: Cache, slots: Int[Array, "batch nodes"], starts: Int[Array, "batch"]
    ) -> Cache:
        """The cache with the contents of ``slots`` copied to the slots from ``starts`` on."""
        return cache.move(slots, starts)

    def rollback(self, cache: Cache, lengths: Int[Array, "batch"]) -> Cache:
        """The cache with each row's length set to ``lengths``."""
        return cache.at(lengths)

    def _extended(self, method: str, *args):
        states, cache = self.apply(*args, method=method)
        return self.logits(states), states, cache

    def apply(self, *args, method: str):
        """A method of the network, with the weights."""
        with cpu_kernels.using(self.kernels):
            return self.module.apply({"params": self.weights}, *args, method=method)


@flax.struct.dataclass
class TextModel(CachedModel):
    """A decoder alone. It has no source: it continues the prompt.

    Of its inputs only the number of rows counts.
    """

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return self.config.num_layers

    def prefill(self, inputs: Int[Array, "batch source"], max_length: int) -> DecoderOnlyCache:
        """An empty cache with room for ``max_length`` tokens."""
        return DecoderOnlyCache.empty(self.config, self.num_layers, inputs.shape[0], max_length)

    def prefill_prompts(
        self,
        inputs: Int[Array, "batch source"],
        prompts: Int[Array, "batch width"],
        max_length: int,
    ) -> DecoderOnlyCache:
        """The cache after ``prompts``, read in one call."""
        cache = self.prefill(inputs, max_length)
        return cache if prompts.shape[1] == 1 else self.read_prompts(cache, prompts)

    def read_prompts(
        self, cache: DecoderOnlyCache, prompts: Int[Array, "batch width"]
    ) -> DecoderOnlyCache:
        """An empty cache with prompts of two tokens or more in it."""
        return self.score(cache, prompts)[1]


def _ready(params: PyTree, module: nn.Module) -> tuple[PyTree, bool]:
    """What a model computes with, and whether by the CPU kernels."""
    if weights_lib.is_packed(params):
        return params, True
    params = jax.tree.map(jnp.asarray, params)
    kernels = module.config.dtype == "float32" and cpu_kernels.suit(params)
    return (weights_lib.pack(params) if kernels else params), kernels
