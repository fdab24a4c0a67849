"""Multi-head attention as T5 has it, over whole sequences and over a cache.

T5 does not rescale the scores by ``head_dim ** -0.5`` (the query's initializer
holds the factor) and adds a learned bias by relative position, shared by all
layers of a stack or, in umT5, each layer's own.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_t5x.interfaces import Nodes
from spec_t5x.machine.cpu_kernels import calls as cpu_kernels
from spec_t5x.models import cache as cache_lib
from spec_t5x.models.cache import Cache, KeysValues
from spec_t5x.models.layers import Dense, RMSNorm, dropout, fan_in_normal
from spec_t5x.models.logical_axes import constrain, param_with_axes
from spec_t5x.types import Array, Bool, Float, Float32, Int

# Added where attention is not allowed; large enough that exp underflows to zero.
MASKED = -1e10
# Bytes of scores above which whole sequences are attended from in parts, and the fewest
# queries of a part: as many as a TPU multiplies at a time.
LARGE_SCORES, FEWEST_QUERIES = 1 << 28, 128

# Puts new keys, or values, in their places of the cached ones.
Write = Callable[[Array, Array], Array]


@flax.struct.dataclass
class PairBias:
    """What is added to the scores of whole sequences, as its two parts.

    Their sum is as large as the scores of all rows.
    """

    by_position: Float32[Array, "1 heads new length"]
    allowed: Bool[Array, "batch 1 new length"]

    @property
    def sum(self) -> Float32[Array, "batch heads new length"]:
        """Bias of all pairs."""
        return self.by_position + mask_bias(self.allowed)

    @property
    def is_large(self) -> bool:
        """Whether the scores are too many to be held at once."""
        return self._num_parts > 1

    @property
    def part_starts(self) -> np.ndarray:
        """Where each part's queries start; the last one overlaps what is before it."""
        new = self.allowed.shape[2]
        return np.minimum(np.arange(0, new, self.part_size), new - self.part_size)

    @property
    def part_size(self) -> int:
        """Queries of a part."""
        return math.ceil(self.allowed.shape[2] / self._num_parts)

    @property
    def _num_parts(self) -> int:
        batch, _, new, length = self.allowed.shape
        num_bytes = 4 * batch * self.by_position.shape[1] * new * length
        return max(1, min(math.ceil(num_bytes / LARGE_SCORES), new // FEWEST_QUERIES))


class Attention(nn.Module):
    """Queries from one sequence, keys and values from another (or the same)."""

    emb_dim: int
    num_heads: int
    head_dim: int
    dropout_rate: float = 0.0
    dtype: str = "float32"
    # Biases, and scores divided by ``sqrt(head_dim)``.
    as_gpt2: bool = False

    def setup(self):
        features, axes = self.num_heads * self.head_dim, ("embed", "joined_kv")

        def query_init(*args):
            return fan_in_normal(*args) * self.head_dim**-0.5

        first_query = fan_in_normal if self.as_gpt2 else query_init
        self.query = Dense(features, axes, self.dtype, first_query, self.as_gpt2)
        self.key = Dense(features, axes, self.dtype, fan_in_normal, self.as_gpt2)
        self.value = Dense(features, axes, self.dtype, fan_in_normal, self.as_gpt2)
        self.out = Dense(self.emb_dim, axes[::-1], self.dtype, fan_in_normal, self.as_gpt2)
        self.weights_dropout = dropout(self.dropout_rate)

    def attend(
        self,
        inputs: Float[Array, "batch new embed"],
        keys: Float[Array, "batch heads length head_dim"],
        values: Float[Array, "batch heads length head_dim"],
        bias: Float32[Array, "#batch #heads #new length"],
        deterministic: bool = True,
    ) -> Float[Array, "batch new embed"]:
        """Attends from ``inputs`` to ready keys and values; softmax in float32."""
        queries = self._split_heads(self.query(inputs)) * self._scale
        return self._joined(self._contexts(queries, keys, values, bias, deterministic))

    def attend_to_sources(
        self,
        states: Float[Array, "batch new embed"],
        norm: RMSNorm,
        keys: Float[Array, "inputs heads source head_dim"],
        values: Float[Array, "inputs heads source head_dim"],
        bias: Float32[Array, "inputs 1 1 source"],
    ) -> Float[Array, "batch new embed"]:
        """``states`` and what they attend to, normed; rows that follow one another read one source.

        They are its queries together, so that it need not be there for each of them.
        """
        if cpu_kernels.in_use(states):
            maps = [dense.for_kernels() for dense in (self.query, self.out)]
            # One bias for all heads and queries: padding of the source.
            return cpu_kernels.source_attention(
                states, norm.for_kernels(), maps, keys, values, bias[:, 0, 0], self._scale
            )
        together = norm(states).reshape(keys.shape[0], -1, states.shape[2])
        return states + self.attend(together, keys, values, bias).reshape(states.shape)

    def _contexts(self, queries, keys, values, bias, deterministic):
        """What each query reads, head by head."""
        # Plain matmuls, row by column: an einsum straight to the layout wanted below
        # swaps the operands, for which XLA's CPU backend has no fast kernel.
        scores = jnp.matmul(queries, keys.swapaxes(2, 3), preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores + bias, axis=-1).astype(self.dtype)
        if not deterministic:
            weights = self.weights_dropout(weights, deterministic=False)
        return jnp.matmul(weights, values)

    def _joined(self, contexts):
        contexts = contexts.swapaxes(1, 2)
        return self.out(contexts.reshape(*contexts.shape[:2], -1))

    def attend_in_parts(
        self,
        inputs: Float[Array, "batch new embed"],
        keys: Float[Array, "batch heads length head_dim"],
        values: Float[Array, "batch heads length head_dim"],
        bias: PairBias,
    ) -> Float[Array, "batch new embed"]:
        """``attend``, from some of the queries at a time: their scores alone take memory."""
        queries = self._split_heads(self.query(inputs)) * self._scale

        def of_part(start):
            part = jax.tree.map(
                lambda array: lax.dynamic_slice_in_dim(array, start, bias.part_size, axis=2),
                (queries, bias),
            )
            return self._contexts(part[0], keys, values, part[1].sum, True)

        starts = bias.part_starts
        parts = lax.map(of_part, jnp.asarray(starts))
        whole = jnp.moveaxis(parts[:-1], 0, 2).reshape(*queries.shape[:2], -1, queries.shape[3])
        rest = parts[-1][:, :, whole.shape[2] - starts[-1] :]
        return self._joined(jnp.concatenate([whole, rest], axis=2))

    def keys_values(
        self, inputs: Float[Array, "batch length embed"]
    ) -> tuple[
        Float[Array, "batch heads length head_dim"],
        Float[Array, "batch heads length head_dim"],
    ]:
        """Keys and values of ``inputs``, in the cache's layout."""
        return self._split_heads(self.key(inputs)), self._split_heads(self.value(inputs))

    def __call__(self, inputs, sources, bias, deterministic: bool = True):
        """Attention over whole sequences: ``inputs`` attend to ``sources``."""
        keys, values = self.keys_values(sources)
        if isinstance(bias, PairBias):
            return self.attend_in_parts(inputs, keys, values, bias)
        return self.attend(inputs, keys, values, bias, deterministic)

    def attend_whole(
        self, states: Float[Array, "batch length embed"], norm: RMSNorm, bias: PairBias
    ) -> Float[Array, "batch length embed"]:
        """``states`` and what they attend to among themselves, normed; by a CPU kernel."""
        given = states, norm.for_kernels(), self._maps, bias.allowed, bias.by_position
        return cpu_kernels.whole_attention(*given, self.head_dim, self._scale)

    def extend(self, states, norm: RMSNorm, cache: KeysValues, write: Write, bias):
        """Writes new tokens into the cache, then attends to all of it.

        Returns ``states`` and what they attend to, normed, and the cache.
        """
        inputs = norm(states)
        keys, values = self.keys_values(inputs)
        cache = cache.replace(keys=write(cache.keys, keys), values=write(cache.values, values))
        return states + self.attend(inputs, cache.keys, cache.values, bias), cache

    def extend_by_kernel(self, states, norm: RMSNorm, cache: KeysValues, kernel: Callable, places):
        """``extend`` by a kernel of ``cpu_kernels``.

        ``places`` are where new tokens go and what they see, as the kernel takes it.
        """
        given = states, norm.for_kernels(), self._maps, cache.keys, cache.values, *places
        states, keys, values = kernel(*given, scale=self._scale)
        return states, cache.replace(keys=keys, values=values)

    @property
    def _maps(self) -> list[cpu_kernels.Matrix]:
        return [dense.for_kernels() for dense in (self.query, self.key, self.value, self.out)]

    @property
    def _scale(self) -> float:
        return self.head_dim**-0.5 if self.as_gpt2 else 1.0

    def _split_heads(self, joined):
        batch, length, _ = joined.shape
        # The layout wanted below stops here. XLA for TPUs would carry it on to the
        # kernels, and keep transposed copies of them for the whole loop (805 MB of T5 XL).
        joined = lax.optimization_barrier(joined)
        heads = joined.reshape(batch, length, self.num_heads, self.head_dim)
        heads = constrain(heads, ("batch", "length", "heads", "kv"))
        return heads.transpose(0, 2, 1, 3)


class RelativeBias(nn.Module):
    """T5's bias by relative position: ``rel_embedding [heads, buckets]``."""

    num_heads: int
    num_buckets: int
    max_distance: int

    def setup(self):
        self.rel_embedding = param_with_axes(
            self,
            "rel_embedding",
            nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
            (self.num_heads, self.num_buckets),
            jnp.float32,
            axes=("heads", "relpos_buckets"),
        )

    def full(self, length: int, bidirectional: bool) -> Float32[Array, "1 heads length length"]:
        """Bias between all pairs of positions; rows are queries."""
        positions = np.arange(length)
        relative = positions[None, :] - positions[:, None]
        buckets = self._bucket(relative, bidirectional)
        return jnp.take(self.rel_embedding, buckets, axis=1)[None]

    def at_distances(
        self, distances: Int[Array, "batch new length"], visible: Bool[Array, "batch new length"]
    ) -> Float32[Array, "batch heads new length"]:
        """Bias of queries over slots that lie ``distances`` before them, where visible."""
        # The bias depends on the distance alone: a table over distances first.
        by_distance = self.by_distance(distances.shape[2])
        bias = jnp.take(by_distance, jnp.maximum(distances, 0), axis=1, mode="clip")
        return jnp.where(visible[None], bias, MASKED).transpose(1, 0, 2, 3)

    def by_distance(self, length: int) -> Float32[Array, "heads length"]:
        """Bias of a key that lies 0, 1, … ``length - 1`` places before its query."""
        return jnp.take(self.rel_embedding, self._bucket(-np.arange(length), False), axis=1)

    def _bucket(self, relative: np.ndarray, bidirectional: bool) -> np.ndarray:
        """Bucket of ``key position - query position``, a constant of the program.

        Half of the buckets hold exact distances, the other half grow
        logarithmically up to ``max_distance`` (Raffel et al. 2020, section 2.1).
        """
        num_buckets, offset = self.num_buckets, 0
        distance = np.maximum(-relative, 0)
        if bidirectional:
            num_buckets //= 2
            offset = (relative > 0) * num_buckets
            distance = np.abs(relative)
        exact = num_buckets // 2
        # float32, and the epsilon, as T5X and Mesh TensorFlow have it: trained
        # weights belong to these very buckets.
        ratio = distance.astype(np.float32) / exact + np.finfo(np.float32).eps
        log_range = np.log(self.max_distance / exact)
        logarithmic = exact + (np.log(ratio) / log_range * (num_buckets - exact)).astype(np.int32)
        logarithmic = np.minimum(logarithmic, num_buckets - 1)
        return offset + np.where(distance < exact, distance, logarithmic)


# How a layer's self-attention takes in new tokens: from the attention, the layer's states, their
# norm, the layer's cache and its own bias by relative position, or None for the one that all
# layers share, to the states and the cache.
ExtendSelf = Callable[
    [Attention, Array, RMSNorm, KeysValues, RelativeBias | None], tuple[Array, KeysValues]
]


def after_texts(
    inputs: Float[Array, "batch new embed"],
    cache: Cache,
    relpos: RelativeBias | None = None,
    bidirectional: Bool[Array, "batch new"] | None = None,
) -> ExtendSelf:
    """New tokens after each row's length, with a bias by relative position or without.

    What the cache holds beyond a row's length has no influence. Tokens that are
    ``bidirectional`` see one another whatever their order; they are given to an empty cache.
    """
    if cpu_kernels.in_use(inputs) and bidirectional is None:
        return _by_kernel(cpu_kernels.extend_attention, cache, relpos, cache.lengths)
    new, length = inputs.shape[1], cache.max_length
    queries = cache.lengths[:, None] + jnp.arange(new)[None, :]
    distances = queries[:, :, None] - jnp.arange(length)[None, None, :]
    visible = distances >= 0
    if bidirectional is not None:
        known = jnp.pad(bidirectional, ((0, 0), (0, length - new)))
        visible |= bidirectional[:, :, None] & known[:, None, :]
    write = functools.partial(cache_lib.write, starts=cache.lengths)
    return _by_write(write, distances, visible, relpos)


def in_slots(
    inputs: Float[Array, "batch new embed"],
    cache: Cache,
    nodes: Nodes,
    relpos: RelativeBias | None = None,
) -> ExtendSelf:
    """New tokens in slots of their own, as ``after_texts``."""
    if cpu_kernels.in_use(inputs):
        places = nodes.slots, nodes.slot_positions, nodes.visible
        return _by_kernel(cpu_kernels.extend_attention_nodes, cache, relpos, *places)
    distances = nodes.positions[:, :, None] - nodes.slot_positions[:, None, :]
    write = functools.partial(cache_lib.write_nodes, nodes=nodes)
    return _by_write(write, distances, nodes.visible, relpos)


def _by_write(
    write: Write,
    distances: Int[Array, "batch new length"],
    visible: Bool[Array, "batch new length"],
    relpos: RelativeBias | None,
) -> ExtendSelf:
    """New tokens in whatever places of the cache ``write`` puts them."""

    def bias_of(relpos: RelativeBias | None) -> Array:
        if relpos is None:
            return mask_bias(visible)[:, None]
        return relpos.at_distances(distances, visible)

    shared = bias_of(relpos)

    def extend(attention, states, norm, cache, own):
        bias = shared if own is None else bias_of(own)
        return attention.extend(states, norm, cache, write, bias)

    return extend


def _by_kernel(kernel: Callable, cache: Cache, relpos: RelativeBias | None, *places) -> ExtendSelf:
    """New tokens by a CPU kernel, which takes the bias by distance."""
    shared = None if relpos is None else relpos.by_distance(cache.max_length)

    def extend(attention, states, norm, layer_cache, own):
        bias = shared if own is None else own.by_distance(cache.max_length)
        return attention.extend_by_kernel(states, norm, layer_cache, kernel, (*places, bias))

    return extend


def mask_bias(allowed: Bool[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Zero where attention is allowed, a large negative number where it is not."""
    return jnp.where(allowed, 0.0, MASKED)
