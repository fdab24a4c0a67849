"""Tiny targets whose distributions are known exactly.

``TableTarget`` looks its logits up under a hash of the row's source and whole prefix. The cache
holds tokens by position and no keys or values: a token written to the wrong position, or one that
outlives its rollback, changes the logits. ``sequence_law`` enumerates the texts of these targets,
so that a loop, a verifier or a draft can be checked against the exact law:

    target = TableTarget.create(seed=0, vocab_size=4, zeros=0.2)
    law = sequence_law(target, [2, 3], sampling(1.0), max_decode_len=3)
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt32

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Nodes
from spec_t5x.sampling.distributions import Sampling, standardize, write_rows
from spec_t5x.types import EOS_ID, PAD_ID, Array, EndOfSequence, Float32, Int

# The content of a cache where nothing was written; no token has this id.
UNWRITTEN = -1


@flax.struct.dataclass
class PrefixCache:
    """Sources, and the tokens fed so far, each at the position to which it was fed."""

    sources: Int[Array, "batch source"]
    tokens: Int[Array, "batch length"]
    # Number of each row's tokens.
    lengths: Int[Array, "batch"]


class PrefixTarget:
    """Base of targets that compute logits from source and whole prefix, at any position.

    Subclasses have a ``vocab_size`` and ``next_logits``. The targets have no decoder states.
    """

    state_size = 0
    max_positions = None

    def next_logits(
        self, sources: Int[Array, "batch source"], prefixes: Int[Array, "batch length"]
    ) -> Float32[Array, "batch length vocab"]:
        """Computes the logits after each token of ``prefixes``, start token first."""
        raise NotImplementedError

    def prefill(
        self,
        inputs: Int[Array, "batch source"],
        max_length: int,
        prompts: Int[Array, "batch width"] | None = None,
    ) -> PrefixCache:
        """Returns a cache for ``max_length`` tokens that holds the prompts; its lengths are 0."""
        batch = inputs.shape[0]
        tokens = jnp.full((batch, max_length), UNWRITTEN, jnp.int32)
        lengths = jnp.zeros(batch, jnp.int32)
        if prompts is not None:
            tokens = write_rows(tokens, prompts[:, :max_length], lengths)
        return PrefixCache(jnp.asarray(inputs, jnp.int32), tokens, lengths)

    def score(
        self, cache: PrefixCache, tokens: Int[Array, "batch new"], num: Any = None
    ) -> tuple[Float32[Array, "batch new vocab"], Float32[Array, "batch new 0"], PrefixCache]:
        """Feeds tokens at each row's length; states are empty, logits beyond the cache are NaN."""
        new = tokens.shape[1]
        written = write_rows(cache.tokens, tokens, cache.lengths)
        positions = cache.lengths[:, None] + jnp.arange(new)[None, :]
        logits = self.next_logits(cache.sources, written)
        logits = jnp.take_along_axis(logits, positions[..., None], axis=1)
        cache = cache.replace(tokens=written, lengths=cache.lengths + new)
        return logits, logits[..., :0], cache

    def num_slots(self, cache: PrefixCache) -> int:
        """Returns the number of tokens of a row that the cache has room for."""
        return cache.tokens.shape[1]

    def score_nodes(
        self, cache: PrefixCache, nodes: Nodes
    ) -> tuple[Float32[Array, "batch nodes vocab"], Float32[Array, "batch nodes 0"], PrefixCache]:
        """Feeds tokens of a tree to their slots; returns logits, empty states and the cache."""
        slots = jax.vmap(lambda row, new, at: row.at[at].set(new))(
            cache.tokens, nodes.tokens, nodes.slots
        )
        length = cache.tokens.shape[1]

        def of_node(source, tokens, slot_positions, visible, position):
            # The text that ends with this node, by position.
            places = jnp.where(visible, slot_positions, length)
            prefix = jnp.full(length, UNWRITTEN, jnp.int32).at[places].set(tokens, mode="drop")
            return self.next_logits(source[None], prefix[None])[0, position]

        of_row = jax.vmap(of_node, (None, None, None, 0, 0))
        logits = jax.vmap(of_row)(
            cache.sources, slots, nodes.slot_positions, nodes.visible, nodes.positions
        )
        return logits, logits[..., :0], cache.replace(tokens=slots)

    def move(
        self, cache: PrefixCache, slots: Int[Array, "batch nodes"], starts: Int[Array, "batch"]
    ) -> PrefixCache:
        """Returns the cache with ``slots`` copied to the slots from ``starts`` on."""
        moved = jnp.take_along_axis(cache.tokens, slots, axis=1)
        return cache.replace(tokens=write_rows(cache.tokens, moved, starts))

    def rollback(self, cache: PrefixCache, lengths: Int[Array, "batch"]) -> PrefixCache:
        """Returns the cache with each row's length set to ``lengths``; its tokens stay."""
        return cache.replace(lengths=lengths)


@flax.struct.dataclass
class TableTarget(PrefixTarget):
    """A target with a table of logits, under a hash of the row's source and whole prefix.

    Padding of the source has no influence, as in a real model. Targets whose tables have the same
    shape share a compiled program, since the table is an array.
    """

    # One row for each value of the hash; -inf for probability zero.
    table: Float32[Array, "contexts vocab"]

    @classmethod
    def create(
        cls,
        seed: int,
        vocab_size: int,
        *,
        contexts: int = 211,
        scale: float = 1.5,
        zeros: float = 0.0,
    ) -> "TableTarget":
        """Draws a table of normal logits of standard deviation ``scale``, for at least 2 tokens.

        The table has ``contexts`` rows; if there is one, the law ignores source and prefix. Each
        token has probability zero with chance ``zeros``, but one random token of each row has not.
        """
        if vocab_size < 2:
            raise InputError(f"vocab_size is {vocab_size}: give at least 2")
        rng = np.random.default_rng(seed)
        logits = rng.normal(scale=scale, size=(contexts, vocab_size))
        is_zero = rng.random((contexts, vocab_size)) < zeros
        is_zero[np.arange(contexts), rng.integers(vocab_size, size=contexts)] = False
        return cls(jnp.asarray(np.where(is_zero, -np.inf, logits), jnp.float32))

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.table.shape[1]

    def next_logits(self, sources, prefixes):
        """Looks up a table row for each prefix, by a hash of source, tokens and positions."""
        return self.table[_contexts(sources, prefixes, self.table.shape[0])]


def conditionals(
    target: PrefixTarget,
    source: Sequence[int],
    settings: Sampling,
    *,
    max_decode_len: int,
    prompt: Sequence[int] = (),
) -> dict[tuple[int, ...], np.ndarray]:
    """Computes the next token's distribution after every text shorter than ``max_decode_len``.

    Keys are texts (the tokens after the start token), which begin with the prompt; values are
    float64 ``[vocab]``. No code of the loops runs. The arguments are ``sequence_law``'s.
    """
    if settings.temperature.ndim:
        raise InputError("settings have a temperature for each row: give one for one row")
    tokens = range(target.vocab_size)
    continuations = itertools.product(tokens, repeat=max_decode_len - 1 - len(prompt))
    texts = [(*prompt, *continuation) for continuation in continuations]
    prefixes = np.array([[PAD_ID, *text] for text in texts], np.int32)
    sources = np.tile(np.asarray(source, np.int32), (len(texts), 1))
    probs = np.asarray(_next_probs(type(target), target, sources, prefixes, settings), np.float64)
    probs /= probs.sum(axis=-1, keepdims=True)
    return {
        text[:length]: probs[row, length]
        for row, text in enumerate(texts)
        for length in range(len(prompt), max_decode_len)
    }


@functools.partial(jax.jit, static_argnums=0)
def _next_probs(kind, target, sources, prefixes, settings):
    # Each ``kind`` gets a program, since JAX may mistake a class for one with the same fields.
    return standardize(target.next_logits(sources, prefixes), settings)


def sequence_law(
    target: PrefixTarget,
    source: Sequence[int],
    settings: Sampling,
    *,
    max_decode_len: int,
    prompt: Sequence[int] = (),
    eos_id: EndOfSequence = EOS_ID,
) -> dict[tuple[int, ...], float]:
    """Returns the probability of each finished text that a row with this source can have.

    Texts are the tokens after the start token, the prompt's included, up to the end-of-sequence
    token or ``max_decode_len`` tokens. Texts of probability zero are left out.

    ``settings`` have one temperature; ``prompt`` has fewer than ``max_decode_len`` tokens.
    """
    by_text = conditionals(target, source, settings, max_decode_len=max_decode_len, prompt=prompt)
    eos_ids = eos_id if isinstance(eos_id, tuple) else (eos_id,)
    law, under_way = {}, [(tuple(prompt), 1.0)]
    while under_way:
        text, probability = under_way.pop()
        for token in np.flatnonzero(by_text[text]).tolist():
            longer = (*text, token), probability * by_text[text][token]
            if token in eos_ids or len(longer[0]) == max_decode_len:
                law[longer[0]] = longer[1]
            else:
                under_way.append(longer)
    return law


def _contexts(
    sources: Int[Array, "batch source"], prefixes: Int[Array, "batch length"], num: int
) -> Int[Array, "batch length"]:
    """Hashes the source and the prefix up to and with each position, to a number below ``num``."""
    of_source = jnp.where(sources == PAD_ID, 0, _hash_tokens(sources))
    of_source = _mix(jnp.sum(of_source, axis=1, dtype=jnp.uint32))
    of_prefix = jnp.cumsum(_hash_tokens(prefixes), axis=1, dtype=jnp.uint32)
    return (_mix(of_source[:, None] + of_prefix) % jnp.uint32(num)).astype(jnp.int32)


def _hash_tokens(tokens: Int[Array, "batch length"]) -> UInt32[Array, "batch length"]:
    """Hashes each token and its position; the sum of the hashes tells texts apart."""
    positions = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.uint32)[None, :]
    return _mix(positions * jnp.uint32(1 << 16) + (tokens + 2).astype(jnp.uint32))


def _mix(values: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Applies the finalizer of MurmurHash3: every bit of the input changes every bit."""
    values = (values ^ (values >> 16)) * jnp.uint32(0x85EBCA6B)
    values = (values ^ (values >> 13)) * jnp.uint32(0xC2B2AE35)
    return values ^ (values >> 16)
