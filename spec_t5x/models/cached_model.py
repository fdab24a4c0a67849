"""A network over a static cache and its parameters, bound together as the loops' ``Target``."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.errors import InputError, check_choice
from spec_t5x.interfaces import Nodes
from spec_t5x.machine.operations import XLA, Operations, pack
from spec_t5x.models import weights as weights_lib
from spec_t5x.models.cache import KVCache, write
from spec_t5x.models.logical_axes import constrain
from spec_t5x.names import AUTO, KV
from spec_t5x.types import Array, Float, Float32, Int, PyTree


@flax.struct.dataclass
class CachedModel:
    """Model that scores tokens against a cache; a subclass has ``prefill``, which makes a cache.

    The model is a pytree whose leaves are the weights, so that it can be an argument of
    compiled functions. It is a target, or the model of a ``TransformerDraft``.
    """

    # The parameters, as packed for ``operations``.
    weights: PyTree
    # The network, which has ``config``, ``extend``, ``extend_nodes`` and ``logits``.
    module: nn.Module = flax.struct.field(pytree_node=False)
    operations: Operations = flax.struct.field(pytree_node=False, default=XLA)
    # Whether ``score`` writes to another model's cache, the layout of which must not change.
    in_targets_cache: bool = flax.struct.field(pytree_node=False, default=False)
    # Type of the source's keys and values, of ``names.KV``.
    kv: str = flax.struct.field(pytree_node=False, default=AUTO)

    # Class of ``module``.
    network: ClassVar[type[nn.Module]]
    # Number of learnt positions; None for relative or rotary ones.
    max_positions: ClassVar[int | None] = None

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        # A dataclass keeps a ``__repr__`` of the class itself. The generated one would copy the
        # weights to the host whenever a notebook shows a model.
        cls.__repr__ = cls.__repr__

    def __repr__(self) -> str:
        size = sum(getattr(leaf, "size", 0) for leaf in jax.tree.leaves(self.weights))
        return f"{type(self).__name__}({size / 1e6:.1f}M parameters)"

    @classmethod
    def create(cls, params: PyTree, config: Any) -> "CachedModel":
        """Makes a model of a parameter tree (T5X's names) and its configuration."""
        weights, operations = pack(params, config.dtype)
        return cls(weights, cls.network(config), operations=operations)

    def with_params(self, params: PyTree) -> "CachedModel":
        """Returns the model with other parameters of the same configuration."""
        weights, operations = pack(params, self.config.dtype)
        return self.replace(weights=weights, operations=operations)

    def rounded(self, bits: int = 8) -> "CachedModel":
        """Returns a model with matrices in 8 or 4 bits; its logits differ from this model's."""
        check_choice("bits", bits, weights_lib.BITS.values())
        tied = self.config.logits_via_embedding
        return self.replace(weights=weights_lib.rounded(self.weights, bits, tied=tied))

    def with_kv(self, kv: str) -> "CachedModel":
        """Returns a model whose caches have the source's keys and values in a type of ``names.KV``.

        Raises ``InputError`` for an unknown type, or "int8" for a model that attends to no source.
        """
        check_choice("kv", kv, KV)
        if kv != AUTO and not self.config.has_source:
            raise InputError(f"kv is {kv!r} and the model has no source: leave kv out")
        return self.replace(kv=kv)

    @property
    def params(self) -> PyTree:
        """Parameters as they were before packing; matrices that were rounded stay rounded."""
        return weights_lib.map_forms(lambda form: form.unpacked(), self.weights)

    @property
    def config(self) -> Any:
        """Configuration of the network."""
        return self.module.config

    @property
    def vocab_size(self) -> int:
        """Number of logits, padding of the vocabulary included."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.config.num_decoder_layers

    @property
    def state_size(self) -> int:
        """Width of ``score``'s states: ``emb_dim`` for the last layer and for each depth."""
        return self.config.emb_dim * (1 + len(getattr(self.module, "depths", ())))

    def score(
        self, cache: KVCache, tokens: Int[Array, "batch new"], num: Int[Array, ""] | None = None
    ) -> tuple[Float32[Array, "batch new vocab"], Float[Array, "batch new embed"], KVCache]:
        """Feeds new tokens at each row's length; returns logits, normed states, and the cache.

        If ``num`` is given, tokens after the first ``num`` of each row may be skipped: XLA
        compiles the call for blocks of several lengths (``call_widths``).
        """
        if num is None:
            found = self._extended("extend", cache, tokens)
        elif self.operations.skips:
            found = self.first(num)._extended("extend", cache, tokens)
        else:
            call = functools.partial(self._extended, "extend")
            found = by_width(call, cache, tokens, num)
        logits, states, cache = found
        return logits, states, cache.laid_out() if self.in_targets_cache else cache

    def first(self, num: Int[Array, ""]) -> "CachedModel":
        """Returns a model whose calls may skip all but the first ``num`` tokens of each row."""
        return self.operations.first(self, num)

    def num_slots(self, cache: KVCache) -> int:
        """Returns the number of tokens that each row of the cache has room for."""
        return cache.max_length

    def score_nodes(
        self, cache: KVCache, nodes: Nodes
    ) -> tuple[Float32[Array, "batch nodes vocab"], Float[Array, "batch nodes embed"], KVCache]:
        """Feeds tokens to their slots; returns logits and states after each, and the cache."""
        return self._extended("extend_nodes", cache, nodes)

    def logits(self, states: Float[Array, "batch new embed"]) -> Float32[Array, "batch new vocab"]:
        """Returns the logits of normed states; on a mesh, gathers the vocabulary once, here.

        Sampling takes maxima, sums and single tokens of the vocabulary: on shards each would be a
        separate collective, and partial sums would round differently.
        """
        # Without the first constraint XLA gathers the matrix for several rows of several tokens.
        logits = constrain(self.apply(states, method="logits"), ("batch", "length", "vocab"))
        return constrain(logits, ("batch", "length", None))

    def move(
        self, cache: KVCache, slots: Int[Array, "batch nodes"], starts: Int[Array, "batch"]
    ) -> KVCache:
        """Returns the cache with ``slots[b]`` copied to consecutive slots from ``starts[b]``."""

        def moved(cached):
            return write(cached, jnp.take_along_axis(cached, slots[:, None, :, None], 2), starts)

        return cache.map(moved)

    def rollback(self, cache: KVCache, lengths: Int[Array, "batch"]) -> KVCache:
        """Returns the cache with each row's length set to ``lengths``."""
        return cache.at(lengths)

    def _extended(self, method: str, *args):
        states, cache = self.apply(*args, method=method)
        return self.logits(states), states, cache

    def apply(self, *args, method: str | Callable):
        """Calls the network's method, or a function of it, with the weights; returns the result."""
        return self.operations.apply(self.module, self.weights, *args, method=method)


@flax.struct.dataclass
class TextModel(CachedModel):
    """Decoder without a source, which continues the prompt.

    Only the number of rows of ``inputs`` is used.
    """

    def prefill(
        self,
        inputs: Int[Array, "batch source"],
        max_length: int,
        prompts: Int[Array, "batch width"] | None = None,
    ) -> KVCache:
        """Returns a cache of ``max_length`` positions, in which one call has fed ``prompts``."""
        cache = KVCache.empty(self.config, inputs.shape[0], max_length)
        return cache if prompts is None else self.read_prompts(cache, prompts)

    def read_prompts(self, cache: KVCache, prompts: Int[Array, "batch width"]) -> KVCache:
        """Feeds ``prompts``, start tokens and padding included, to an empty cache; returns it."""
        return self.score(cache, prompts)[2]


def by_width(
    score: Callable, cache: PyTree, tokens: Int[Array, "batch new"], num: Int[Array, ""]
) -> tuple[Float32[Array, "batch new vocab"], Float[Array, "batch new embed"], PyTree]:
    """Runs ``score`` on the first ``num`` tokens, rounded up to one of ``call_widths``.

    Results of other tokens are zeros. XLA compiles a branch for each width.
    """

    def call(width, cache, tokens):
        *found, cache = score(cache, tokens[:, :width])
        missing = ((0, 0), (0, tokens.shape[1] - width), (0, 0))
        return *(jnp.pad(values, missing) for values in found), cache

    widths = call_widths(tokens.shape[1])
    smallest = jnp.searchsorted(jnp.asarray(widths), num)
    return lax.switch(smallest, [functools.partial(call, n) for n in widths], cache, tokens)


def call_widths(largest: int) -> tuple[int, ...]:
    """Returns the widths of calls, up to ``largest``, that are compiled if proposals vary.

    >>> call_widths(6)
    (1, 2, 4, 6)
    """
    return tuple(min(2**i, largest) for i in range((largest - 1).bit_length() + 1))
