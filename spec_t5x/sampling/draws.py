"""Streams of random keys, and the draws that are made from them.

* ``RowStream`` has a key for each row. A row's draws depend on this key and on positions in the
  row's text alone, not on other rows, padding or the number of iterations.
* ``T5XStream`` is T5X's chain, one key for each step, whose noise covers the whole batch: it
  samples the texts of ``t5x.decoding.temperature_sample``.

A draft takes its tokens from ``Draws``, for either stream. If the verifier is coupled, draft and
target see the same Gumbel noise at the same position, so that they mostly choose the same token
(arXiv 2408.07978).
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from spec_t5x.sampling.distributions import Sampling, argmax, check_float32, gumbel_argmax, sample
from spec_t5x.sampling.random_bits import fold_in, fractions, is_threefry
from spec_t5x.types import Array, Float, Float32, Int, Key, UInt32

# Number that is folded into a row's key for noise: ``RowStream.at`` folds positions, all below it.
_NOISE = 0x6E6F6973


@flax.struct.dataclass
class RowStream:
    """Stream of one key for each row."""

    keys: Key[Array, "batch"]

    def at(self, positions: Int[Array, "batch"], num: int) -> tuple[Key[Array, "batch"], ...]:
        """Returns ``num`` independent keys for each row; no position has the keys of another."""
        here = jax.vmap(fold_in)(self.keys, positions)
        # The keys of ``split`` may depend on their number. One call makes all of them: a call
        # takes as long as hashing hundreds of keys.
        numbered = jax.vmap(jax.vmap(fold_in, (0, None)), (None, 0))
        return tuple(numbered(here, jnp.arange(num)))

    def gumbels(
        self, positions: Int[Array, "batch"], vocab_size: int
    ) -> Float32[Array, "batch vocab"]:
        """Returns the noise that chooses the token at each row's position."""

        def of_row(key, position):
            key = fold_in(fold_in(key, _NOISE), position)
            return jax.random.gumbel(key, (vocab_size,))

        return jax.vmap(of_row)(self.keys, positions)


@flax.struct.dataclass
class T5XStream:
    """T5X's chain of keys, ``key, next = split(key)`` in every step; ``t5x_stream`` makes it.

    The noise of a step is drawn for the whole batch, so that a row's text depends on the row's
    index, as in T5X.
    """

    # The key of each step.
    steps: Key[Array, "steps"]
    # Position at which each row's first step is.
    starts: Int[Array, "batch"]
    # T5X maps over rows if each has its own temperature, and all get the same noise.
    same_for_rows: bool = flax.struct.field(pytree_node=False, default=False)

    def gumbels(
        self, positions: Int[Array, "batch"], vocab_size: int
    ) -> Float32[Array, "batch vocab"]:
        """Returns the noise that chooses the token at each row's position."""
        batch = self.starts.shape[0]
        # Proposals of an ended row may be beyond the last step; nothing reads their noise.
        keys = self.steps.at[positions - self.starts].get(mode="clip")
        if self.same_for_rows:
            return jax.vmap(lambda key: jax.random.gumbel(key, (1, vocab_size))[0])(keys)
        rows = jnp.arange(batch, dtype=jnp.uint32)
        if _drawn_apart(self.steps, batch * vocab_size):
            return jax.vmap(_gumbel_row, (0, 0, None))(keys, rows, vocab_size)
        # Rows may be at different steps, the noise of each of which is as large as the batch: a
        # loop holds one at a time.
        noise = functools.partial(jax.random.gumbel, shape=(batch, vocab_size))
        return lax.map(lambda step: noise(step[0])[step[1]], (keys, rows))


def _drawn_apart(keys: Key[Array, "*batch"], size: int) -> bool:
    """Tells whether each of ``size`` numbers that JAX draws depends on key and index alone."""
    return is_threefry(keys) and not jax.config.jax_high_dynamic_range_gumbel and size <= 1 << 32


def _gumbel_row(key: Key[Array, ""], row: UInt32[Array, ""], width: int) -> Float32[Array, "width"]:
    """Returns ``jax.random.gumbel(key, (rows, width))[row]``, bit for bit, and no other row."""
    indices = row * jnp.uint32(width) + jnp.arange(width, dtype=jnp.uint32)
    high, low = threefry2x32_p.bind(*jax.random.key_data(key), jnp.zeros_like(indices), indices)
    tiny = jnp.finfo(jnp.float32).tiny
    uniforms = fractions(high, low) * (1 - tiny) + tiny
    return -jnp.log(-jnp.log(jnp.maximum(tiny, uniforms)))


Stream = RowStream | T5XStream


def t5x_stream(
    rng: Key[Array, ""], starts: Int[Array, "batch"], num_steps: int, same_for_rows: bool = False
) -> T5XStream:
    """Returns the chain that T5X's sampling loop makes of ``rng``, its ``decode_rng``.

    ``starts`` are the lengths of the prompts, or zeros if T5X does not prefill them, and
    ``num_steps`` is the largest number of generated tokens. T5X draws noise that is
    ``same_for_rows`` if each row has its own temperature.
    """

    def split(key, _):
        now, following = jax.random.split(key)
        return following, now

    _, steps = lax.scan(split, rng, length=num_steps)
    return T5XStream(steps=steps, starts=starts, same_for_rows=same_for_rows)


@flax.struct.dataclass
class Draws:
    """Random draws of a draft's proposals, one after the other.

        token, draws = draws.next(probs, settings)

    The same ``Draws`` give the same token again, so pass on those that are returned, in a loop as
    part of its carry. A proposal has their ``drawn``: tokens that were not drawn one by one do
    not count as proposed (``interfaces.Proposal``).
    """

    stream: Stream
    # Tokens that the rows hold; the first proposal goes to this position.
    lengths: Int[Array, "batch"]
    # Number of tokens drawn: the next proposal goes to position ``lengths + drawn``.
    drawn: Int[Array, ""] | int = 0
    # True if the verifier uses the same noise.
    coupled: bool = flax.struct.field(pytree_node=False, default=False)

    def next(
        self, probs: Float32[Array, "batch vocab"], settings: Sampling
    ) -> tuple[Int[Array, "batch"], "Draws"]:
        """Draws a token of each row's distribution; also returns the draws of the next token.

        ``probs`` were standardized with ``settings``.
        """
        check_float32(probs, "a draft's probabilities")
        positions, after = self.lengths + self.drawn, self.replace(drawn=self.drawn + 1)
        if self.coupled or settings.greedy:
            return sample_coupled(self.stream, positions, probs, settings), after
        keys = jax.vmap(fold_in)(self.stream.keys, positions)
        return jax.vmap(sample)(keys, probs), after

    def next_distinct(
        self,
        probs: Float32[Array, "batch vocab"],
        logits: Float[Array, "batch vocab"],
        num: int,
        settings: Sampling,
    ) -> tuple[Int[Array, "batch num"], "Draws"]:
        """Draws ``num`` tokens without replacement, in order: the children of a node of a tree.

        ``probs`` are ``logits`` standardized with ``settings``; at temperature 0 the likeliest
        tokens are taken. Tokens of probability 0 are added if there are too few others. ``drawn``
        counts nodes.
        """
        check_float32(probs, "a draft's probabilities")
        after = self.replace(drawn=self.drawn + 1)
        if settings.greedy:
            return lax.top_k(logits, num)[1], after
        keys = jax.vmap(fold_in, (0, None))(self.stream.keys, self.drawn)
        gumbels = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[1:]))(keys)
        # The largest perturbed logarithms are in the order of successive draws.
        return lax.top_k(jnp.log(probs) + gumbels, num)[1], after


def purpose_keys(
    stream: RowStream, lengths: Int[Array, "batch"]
) -> tuple[Key[Array, "batch"], Key[Array, "batch"], Key[Array, "batch"]]:
    """Returns the keys of one iteration: to emit a token, to accept drafts, to propose them.

    The first key of ``at`` does not depend on their number, so that plain decoding draws the
    tokens of gamma = 0.
    """
    return stream.at(lengths, 3)


def draft_draws(stream: Stream, lengths: Int[Array, "batch"], coupled: bool) -> Draws:
    """Returns the draws of a draft in the iteration that starts at ``lengths``."""
    if coupled:
        return Draws(stream, lengths, coupled=True)
    return Draws(RowStream(purpose_keys(stream, lengths)[2]), lengths)


def sample_next(
    stream: Stream,
    lengths: Int[Array, "batch"],
    probs: Float32[Array, "batch vocab"],
    settings: Sampling,
    coupled: bool,
) -> Int[Array, "batch"]:
    """Draws the next token of each row in plain decoding."""
    if coupled or settings.greedy:
        return sample_coupled(stream, lengths, probs, settings)
    (keys,) = stream.at(lengths, 1)
    return jax.vmap(sample)(keys, probs)


def sample_coupled(
    stream: Stream,
    positions: Int[Array, "batch"],
    probs: Float32[Array, "batch vocab"],
    settings: Sampling,
) -> Int[Array, "batch"]:
    """Returns the token that the noise at each row's position chooses from ``probs``."""
    if settings.greedy:
        return argmax(probs)
    return gumbel_argmax(probs, stream.gumbels(positions, probs.shape[-1]))
