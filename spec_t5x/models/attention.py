"""Multi-head attention over whole sequences and over a cache.

T5 does not rescale the scores by ``head_dim ** -0.5`` (the query's initializer
has the factor) and adds a learned bias by relative position, shared by all
layers of a stack or, in umT5, separate for each layer. ``Traits`` has other models' choices.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_t5x.interfaces import Nodes
from spec_t5x.models.cache import KVCache, LayerCache, RoundedHeads, write
from spec_t5x.models.layers import Dense, GemmaNorm, dropout, fan_in_normal
from spec_t5x.models.logical_axes import constrain, param_with_axes
from spec_t5x.types import Array, Bool, Float, Float32, Int

# Added where attention is not allowed; large enough that exp underflows to zero.
MASKED = -1e10
# Bytes of scores above which whole sequences attend in parts, and the fewest queries of a part,
# a TPU's tile.
LARGE_SCORES, FEWEST_QUERIES = 1 << 28, 128

# Keys, values, and the bias that is added to the queries' scores over them.
Source = tuple[Array | RoundedHeads, Array | RoundedHeads, Array]


@dataclasses.dataclass(frozen=True)
class Traits:
    """Choices in which an attention may differ from T5's, which are the defaults."""

    # Number of heads of keys and values, shared evenly by the query heads; None for ``num_heads``.
    num_kv_heads: int | None = None
    # Factor by which queries are multiplied.
    scale: float = 1.0
    use_bias: bool = False
    # Function that turns queries or keys by their positions, the second argument; None for none.
    rotate: Callable[[Array, Array], Array] | None = None
    # Number of positions that a decoder's query attends to, up to its own; None for all.
    window: int | None = None
    # Positions before and after its own that an encoder's query attends to; None for all.
    reach: tuple[int, int] | None = None
    # Bound that a tanh puts on the scores; 0 for none.
    softcap: float = 0.0
    # Epsilon of Gemma's norm on each head of queries and keys; None for no norm.
    head_norm: float | None = None


@flax.struct.dataclass
class PairBias:
    """Attention bias of whole sequences in two small parts, whose sum is as large as the scores."""

    # Bias by relative position; None for none. ``allowed`` masks the pairs that attend.
    by_position: Float[Array, "1 heads new length"] | None
    allowed: Bool[Array, "batch 1 new length"]
    num_heads: int = flax.struct.field(pytree_node=False)

    @functools.cached_property
    def sum(self) -> Float[Array, "batch #heads new length"]:
        """Bias of all pairs of query and key, computed once for all layers that share it."""
        mask = mask_bias(self.allowed)
        return mask if self.by_position is None else self.by_position + mask

    @property
    def part_size(self) -> int:
        """Number of queries whose scores are computed at a time, to bound their memory."""
        batch, _, new, length = self.allowed.shape
        # A batch of any size, as in an export, has no number to bound.
        if not isinstance(batch, int):
            return new
        num_bytes = 4 * batch * self.num_heads * new * length
        num_parts = max(1, min(math.ceil(num_bytes / LARGE_SCORES), new // FEWEST_QUERIES))
        return math.ceil(new / num_parts)


class Attention(nn.Module):
    """Multi-head attention: queries from one sequence, keys and values from any."""

    emb_dim: int
    num_heads: int
    head_dim: int
    dropout_rate: float = 0.0
    dtype: str = "float32"
    traits: Traits = Traits()

    def setup(self):
        traits, axes = self.traits, ("embed", "joined_kv")
        kv_features = (traits.num_kv_heads or self.num_heads) * self.head_dim
        features = self.num_heads * self.head_dim

        def query_init(*args):
            return fan_in_normal(*args) * self.head_dim**-0.5

        def dense(features, init=fan_in_normal, axes=axes):
            return Dense(features, axes, self.dtype, init, traits.use_bias)

        self.query = dense(features, query_init if traits.scale == 1 else fan_in_normal)
        self.key = dense(kv_features)
        self.value = dense(kv_features)
        self.out = dense(self.emb_dim, axes=axes[::-1])
        if traits.head_norm is not None:
            self.query_norm = GemmaNorm(traits.head_norm, self.dtype)
            self.key_norm = GemmaNorm(traits.head_norm, self.dtype)
        self.weights_dropout = dropout(self.dropout_rate)

    def attend(
        self,
        inputs: Float[Array, "batch new embed"],
        *sources: Source,
        deterministic: bool = True,
        positions: Int[Array, "#batch new"] | None = None,
    ) -> Float[Array, "batch new embed"]:
        """Returns the attention of normed ``inputs`` to all ``sources`` in one float32 softmax.

        A source is keys and values ``[inputs kv_heads length head_dim]`` and a bias
        ``[#inputs #heads #new length]``, which the consecutive rows of an input share.
        ``positions`` rotate the queries.
        """
        queries = self._queries(inputs, positions)
        return self._joined(self._contexts(queries, sources, deterministic))

    def _queries(self, inputs, positions=None):
        return self._heads(self.query(inputs), "query_norm", positions) * self.traits.scale

    def _heads(self, joined, norm: str, positions):
        """Splits queries or keys into heads; norms and rotates these if the traits say so."""
        heads = self._split_heads(joined)
        if self.traits.head_norm is not None:
            heads = getattr(self, norm)(heads)
        if self.traits.rotate is not None and positions is not None:
            heads = self.traits.rotate(heads, positions)
        return heads

    def _contexts(self, queries, sources: Sequence[Source], deterministic):
        """Averages the values of all sources for each query and head, by one softmax."""
        batch = queries.shape[0]
        scores = [self._scores(queries, keys) + _by_row(bias, batch) for keys, _, bias in sources]
        lengths = [keys.shape[2] for keys, _, _ in sources]
        joined = scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1)
        weights = jax.nn.softmax(joined, axis=-1).astype(self.dtype)
        if not deterministic:
            weights = self.weights_dropout(weights, deterministic=False)
        parts = jnp.split(weights, np.cumsum(lengths)[:-1], axis=-1)
        read = [_read(part, values) for part, (_, values, _) in zip(parts, sources, strict=True)]
        return functools.reduce(operator.add, read)

    def _scores(self, queries, keys):
        # Plain matmuls, row by column: an einsum straight to the layout wanted below
        # swaps the operands, for which XLA's CPU backend has no fast kernel.
        keys, scales = _operand(keys, queries.dtype)
        grouped, ungroup = _by_group(queries, keys)
        scores = jnp.matmul(grouped, keys.swapaxes(2, 3), preferred_element_type=jnp.float32)
        scores = scores * scales
        cap = self.traits.softcap
        return ungroup(cap * jnp.tanh(scores / cap) if cap else scores)

    def _joined(self, contexts):
        contexts = contexts.swapaxes(1, 2)
        return self.out(contexts.reshape(*contexts.shape[:2], -1))

    def keys_values(
        self,
        inputs: Float[Array, "batch length embed"],
        positions: Int[Array, "#batch length"] | None = None,
    ) -> tuple[
        Float[Array, "batch kv_heads length head_dim"],
        Float[Array, "batch kv_heads length head_dim"],
    ]:
        """Returns keys and values in the cache's layout; ``positions`` rotate the keys."""
        keys = self._heads(self.key(inputs), "key_norm", positions)
        return keys, self._split_heads(self.value(inputs))

    def __call__(self, inputs, sources, bias, deterministic: bool = True):
        """Attends from whole ``inputs`` to whole ``sources``; adds ``bias`` to the scores."""
        return self.attend(inputs, (*self.keys_values(sources), bias), deterministic=deterministic)

    def attend_to_itself(self, inputs, bias, deterministic, *sources: tuple[Array, Array]):
        """Attends from a sequence to itself and, in one softmax, to ``sources`` (states, bias)."""
        positions = jnp.arange(inputs.shape[1])[None]
        keys, values = self.keys_values(inputs, positions)
        if isinstance(bias, PairBias):
            if deterministic and bias.part_size < inputs.shape[1]:
                return self._attend_in_parts(self._queries(inputs, positions), keys, values, bias)
            bias = bias.sum
        others = [(*self.keys_values(encoded), of_source) for encoded, of_source in sources]
        given = {"deterministic": deterministic, "positions": positions}
        return self.attend(inputs, (keys, values, bias), *others, **given)

    def _attend_in_parts(self, queries, keys, values, bias: PairBias):
        """Attends from ``bias.part_size`` queries at a time, so that scores take less memory."""
        size, new = bias.part_size, queries.shape[2]
        # The last part overlaps the one before it.
        starts = np.minimum(np.arange(0, new, size), new - size)

        def contexts_from(start):
            part, its_bias = jax.tree.map(
                lambda array: lax.dynamic_slice_in_dim(array, start, size, axis=2), (queries, bias)
            )
            return self._contexts(part, [(keys, values, its_bias.sum)], True)

        parts = lax.map(contexts_from, jnp.asarray(starts))
        whole = jnp.moveaxis(parts[:-1], 0, 2).reshape(*queries.shape[:2], -1, queries.shape[3])
        rest = parts[-1][:, :, whole.shape[2] - starts[-1] :]
        return self._joined(jnp.concatenate([whole, rest], axis=2))

    def extend(
        self,
        inputs: Float[Array, "batch new embed"],
        cache: LayerCache,
        tokens: "NewTokens",
        relpos: "RelativeBias | None" = None,
        source: Source | None = None,
    ) -> tuple[Float[Array, "batch new embed"], LayerCache]:
        """Returns new tokens' attention to a layer's cache, and the cache with them written.

        ``relpos`` is the bias of a layer with a separate one; ``source`` is in the same softmax.
        """
        keys, values = self.keys_values(inputs, tokens.positions)
        bias = tokens.bias(relpos, self.traits.window)
        keys = write(cache.keys, keys, tokens.places)
        values = write(cache.values, values, tokens.places)
        sources = [(keys, values, bias)] + ([] if source is None else [source])
        attended = self.attend(inputs, *sources, positions=tokens.positions)
        return attended, cache.replace(keys=keys, values=values)

    def _split_heads(self, joined):
        batch, length, _ = joined.shape
        if jax.default_backend() != "gpu":
            # Keeps the layout of the transpose below from the kernels: XLA for TPUs would
            # keep transposed copies of them for the whole loop (805 MB for T5 XL).
            # XLA for GPUs does not, and fuses the transpose with what follows.
            joined = lax.optimization_barrier(joined)
        heads = joined.reshape(batch, length, -1, self.head_dim)
        heads = constrain(heads, ("batch", "length", "heads", "kv"))
        return heads.transpose(0, 2, 1, 3)


def _by_row(bias, batch: int):
    """Repeats each input's bias for its rows; keeps a bias of all rows, or one for each row."""
    inputs = bias.shape[0]
    return bias if inputs in (1, batch) else jnp.repeat(bias, batch // inputs, axis=0)


def _read(weights, values):
    """Returns each query's sum of the values, weighted by its attention weights."""
    values, scales = _operand(values, weights.dtype)
    grouped, ungroup = _by_group(weights, values)
    return ungroup(jnp.matmul(grouped * scales, values))


def _operand(heads: Array | RoundedHeads, dtype) -> tuple[Array, Array | float]:
    """Returns keys or values as an operand of a product, and the factors of their positions.

    XLA widens int8 as it reads the operand, so that no wider copy is stored.
    """
    if isinstance(heads, RoundedHeads):
        return heads.values.astype(dtype), heads.scales
    return heads, 1.0


def _by_group(
    queries: Float[Array, "batch heads new width"],
    keys: Float[Array, "inputs kv_heads length head_dim"],
) -> tuple[Float[Array, "inputs kv_heads queries width"], Callable[[Array], Array]]:
    """Returns the queries grouped by the keys that they read, and the inverse for results.

    A group has the rows of one input, and the query heads that share a head of keys.
    """
    (batch, heads, new, width), (inputs, kv_heads) = queries.shape, keys.shape[:2]
    if (batch, heads) == (inputs, kv_heads):
        return queries, lambda results: results
    rows, group = batch // inputs, heads // kv_heads
    apart = queries.reshape(inputs, rows, kv_heads, group, new, width)
    together = apart.transpose(0, 2, 1, 3, 4, 5).reshape(inputs, kv_heads, -1, width)

    def ungroup(results):
        apart = results.reshape(inputs, kv_heads, rows, group, new, -1)
        return apart.transpose(0, 2, 1, 3, 4, 5).reshape(batch, heads, new, -1)

    return together, ungroup


class RelativeBias(nn.Module):
    """T5's bias by relative position: ``rel_embedding [heads, buckets]``."""

    num_heads: int
    num_buckets: int
    max_distance: int

    def setup(self):
        init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
        shape, axes = (self.num_heads, self.num_buckets), ("heads", "relpos_buckets")
        self.rel_embedding = param_with_axes(self, "rel_embedding", init, shape, axes)

    def full(self, length: int, bidirectional: bool) -> Float[Array, "1 heads length length"]:
        """Returns the bias between all pairs of positions, queries on the last axis but one."""
        positions = np.arange(length)
        buckets = self._bucket(positions[None, :] - positions[:, None], bidirectional)
        return jnp.take(self.rel_embedding, buckets, axis=1)[None]

    def by_distance(self, length: int) -> Float[Array, "heads length"]:
        """Returns the bias of keys 0, 1, … ``length - 1`` positions before their query."""
        return jnp.take(self.rel_embedding, self._bucket(-np.arange(length), False), axis=1)

    def _bucket(self, relative: np.ndarray, bidirectional: bool) -> np.ndarray:
        """Returns the buckets of ``key position - query position``, constants of the program.

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
        # float32 and the epsilon, as in T5X and Mesh TensorFlow: checkpoints were
        # trained with the buckets that this rounding gives.
        ratio = distance.astype(np.float32) / exact + np.finfo(np.float32).eps
        log_range = np.float32(np.log(self.max_distance / exact))
        logarithmic = exact + (np.log(ratio) / log_range * (num_buckets - exact)).astype(np.int32)
        logarithmic = np.minimum(logarithmic, num_buckets - 1)
        return offset + np.where(distance < exact, distance, logarithmic)


@dataclasses.dataclass(eq=False)
class NewTokens:
    """New tokens of a cached call: their slots and positions, and the slots they attend to."""

    # Slot of each row's first token, if its others follow in consecutive slots; else ``Nodes``.
    places: Int[Array, "batch"] | Nodes
    # Positions of the tokens in their texts, and of each slot's token.
    positions: Int[Array, "batch new"]
    slot_positions: Int[Array, "#batch length"]
    # Slots that each token attends to; None for those of earlier positions and its own.
    visible: Bool[Array, "batch new length"] | None
    # The relative bias that all layers share; None if there is none.
    relpos: RelativeBias | None

    def __post_init__(self):
        self._distances = self.positions[:, :, None] - self.slot_positions[:, None, :]
        self._visible = self._distances >= 0 if self.visible is None else self.visible

    def bias(self, own: RelativeBias | None, window: int | None) -> Float[Array, "..."]:
        """Returns a layer's bias: ``own`` or the shared relative bias, masked to a ``window``."""
        return self._shared if own is None and window is None else self._bias(own, window)

    def by_distance(self, own: RelativeBias | None) -> Float[Array, "heads length"] | None:
        """Returns a layer's relative bias by distance: ``own``, or the shared one, or None."""
        return self._shared_table if own is None else own.by_distance(self._distances.shape[2])

    @functools.cached_property
    def _shared(self) -> Array:
        return self._bias(None, None)

    @functools.cached_property
    def _shared_table(self) -> Array | None:
        return None if self.relpos is None else self.relpos.by_distance(self._distances.shape[2])

    def _bias(self, own: RelativeBias | None, window: int | None) -> Array:
        visible = self._visible
        if window is not None:
            visible &= self._distances < window
        # The bias depends on the distance alone, so it is looked up in a table over distances.
        table = self.by_distance(own)
        if table is None:
            return mask_bias(visible)[:, None]
        bias = jnp.take(table, jnp.maximum(self._distances, 0), axis=1, mode="clip")
        return jnp.where(visible[None], bias, MASKED).transpose(1, 0, 2, 3)


def after_texts(
    cache: KVCache,
    new: int,
    relpos: RelativeBias | None = None,
    bidirectional: Bool[Array, "batch new"] | None = None,
) -> NewTokens:
    """Returns ``new`` tokens placed after each row's length; layers share the bias ``relpos``.

    The cache's contents beyond a row's length have no influence. Tokens that ``bidirectional``
    marks attend to one another in both directions; they require an empty cache.
    """
    length = cache.max_length
    positions = cache.lengths[:, None] + jnp.arange(new)[None, :]
    slots, visible = jnp.arange(length)[None], None
    if bidirectional is not None:
        known = jnp.pad(bidirectional, ((0, 0), (0, length - new)))
        visible = positions[:, :, None] >= slots[:, None]
        visible |= bidirectional[:, :, None] & known[:, None, :]
    return NewTokens(cache.lengths, positions, slots, visible, relpos)


def in_slots(nodes: Nodes, relpos: RelativeBias | None = None) -> NewTokens:
    """Returns new tokens placed in the slots of ``nodes``; layers share the bias ``relpos``."""
    return NewTokens(nodes, nodes.positions, nodes.slot_positions, nodes.visible, relpos)


def mask_bias(allowed: Bool[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns a bias: 0 where attention is allowed, ``MASKED`` elsewhere."""
    return jnp.where(allowed, 0.0, MASKED)
