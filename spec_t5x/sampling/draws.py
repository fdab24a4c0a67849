"""Where random numbers come from: streams of keys, and the draws made from them.

A row's draws depend on the row's own key and on positions in its text, never on the
rows beside it, on padding or on how many iterations were needed. Two kinds of stream:

* ``RowStream``: a key for each row, the package's own;
* ``T5XStream``: T5X's chain, one key for each step, whose noise covers the whole batch.
  What is sampled with it is what ``t5x.decoding.temperature_sample`` samples.

A draft asks ``Draws`` for its tokens and need not know which. Where the verifier is
coupled, draft and target see the same Gumbel noise at the same position, so that they
mostly choose the same token (arXiv 2408.07978).
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

# Folded into a row's key where ``RowStream.at`` folds a position: beyond any position.
_NOISE = 0x6E6F6973


@flax.struct.dataclass
class RowStream:
    """One key for each row."""

    keys: Key[Array, "batch"]

    def at(self, positions: Int[Array, "batch"], num: int) -> tuple[Key[Array, "batch"], ...]:
        """``num`` independent keys for each row, which depend on its position alone.

        Positions grow in every iteration, so that no key comes back.
        """
        here = jax.vmap(fold_in)(self.keys, positions)
        # Not ``split``, whose keys may depend on how many are asked for. All at once: a call
        # costs what hashing hundreds of keys does.
        numbered = jax.vmap(jax.vmap(fold_in, (0, None)), (None, 0))
        return tuple(numbered(here, jnp.arange(num)))

    def gumbels(
        self, positions: Int[Array, "batch"], vocab_size: int
    ) -> Float32[Array, "batch vocab"]:
        """The noise that chooses the token at each row's position."""

        def of_row(key, position):
            key = fold_in(fold_in(key, _NOISE), position)
            return jax.random.gumbel(key, (vocab_size,))

        return jax.vmap(of_row)(self.keys, positions)


@flax.struct.dataclass
class T5XStream:
    """T5X's chain of keys: ``key, next = split(key)`` in every step.

    The noise of a step is drawn for the whole batch, so a row's text depends on its
    place in it, as in T5X. Make one with ``t5x_stream``.
    """

    # The key of each step.
    steps: Key[Array, "steps"]
    # Position at which each row's first step is.
    starts: Int[Array, "batch"]
    # T5X maps over rows when each has its own temperature: all get the same noise.
    same_for_rows: bool = flax.struct.field(pytree_node=False, default=False)

    def gumbels(
        self, positions: Int[Array, "batch"], vocab_size: int
    ) -> Float32[Array, "batch vocab"]:
        """The noise that chooses the token at each row's position."""
        batch = self.starts.shape[0]
        # An ended row may be proposed for beyond the last step; nothing reads that.
        keys = self.steps.at[positions - self.starts].get(mode="clip")
        if self.same_for_rows:
            return jax.vmap(lambda key: jax.random.gumbel(key, (1, vocab_size))[0])(keys)
        rows = jnp.arange(batch, dtype=jnp.uint32)
        if _drawn_apart(self.steps, batch * vocab_size):
            return jax.vmap(_gumbel_row, (0, 0, None))(keys, rows, vocab_size)
        # One row after the other: each may be at another step, whose noise is as large
        # as the batch.
        noise = functools.partial(jax.random.gumbel, shape=(batch, vocab_size))
        return lax.map(lambda step: noise(step[0])[step[1]], (keys, rows))


def _drawn_apart(keys: Key[Array, "*batch"], size: int) -> bool:
    """Whether a number of an array that JAX draws depends on the key and its index alone.

    Of arrays of ``size`` numbers, whose indices are to fit 32 bits.
    """
    return is_threefry(keys) and not jax.config.jax_high_dynamic_range_gumbel and size <= 1 << 32


def _gumbel_row(key: Key[Array, ""], row: UInt32[Array, ""], width: int) -> Float32[Array, "width"]:
    """``jax.random.gumbel(key, (rows, width))[row]``, bit for bit, without the other rows."""
    indices = row * jnp.uint32(width) + jnp.arange(width, dtype=jnp.uint32)
    high, low = threefry2x32_p.bind(*jax.random.key_data(key), jnp.zeros_like(indices), indices)
    tiny = jnp.finfo(jnp.float32).tiny
    uniforms = fractions(high, low) * (1 - tiny) + tiny
    return -jnp.log(-jnp.log(jnp.maximum(tiny, uniforms)))


Stream = RowStream | T5XStream


def t5x_stream(
    rng: Key[Array, ""], starts: Int[Array, "batch"], num_steps: int, same_for_rows: bool = False
) -> T5XStream:
    """The chain that T5X's sampling loop makes of ``rng``.

    Args:
      rng: T5X's ``decode_rng``.
      starts: length of each row's prompt, or zeros where T5X does not prefill it.
      num_steps: tokens generated at most.
      same_for_rows: whether each row has its own temperature.
    """

    def split(key, _):
        now, following = jax.random.split(key)
        return following, now

    _, steps = lax.scan(split, rng, length=num_steps)
    return T5XStream(steps=steps, starts=starts, same_for_rows=same_for_rows)


@flax.struct.dataclass
class Draws:
    """What a draft samples its proposals with, one after the other.

        token, draws = draws.next(probs, settings)

    The same ``Draws`` give the same token again, so hand on those that came back, in a
    loop as part of what it carries. A proposal names their ``drawn``, and what was not
    drawn by itself does not count as proposed (``interfaces.Proposal``).
    """

    stream: Stream
    # Tokens that the rows hold; the first proposal goes to this position.
    lengths: Int[Array, "batch"]
    # How many were drawn: the next proposal goes to position ``lengths + drawn``.
    drawn: Int[Array, ""] | int = 0
    # Whether the verifier looks at the same noise.
    coupled: bool = flax.struct.field(pytree_node=False, default=False)

    def next(
        self, probs: Float32[Array, "batch vocab"], settings: Sampling
    ) -> tuple[Int[Array, "batch"], "Draws"]:
        """A token of each row's distribution, and the draws to take the next one with.

        Args:
          probs: after ``standardize``.
          settings: what ``probs`` were standardized with.
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
        """``num`` tokens without replacement, in the order that they were drawn in.

        For the children of one node of a tree; ``drawn`` counts nodes.

        Args:
          probs: after ``standardize``; where fewer than ``num`` tokens have any
            probability, tokens without any make up the number.
          logits: what ``probs`` were made from; at temperature 0 the likeliest are taken.
          num: tokens for each row.
          settings: what ``probs`` were standardized with.
        """
        check_float32(probs, "a draft's probabilities")
        after = self.replace(drawn=self.drawn + 1)
        if settings.greedy:
            return lax.top_k(logits, num)[1], after
        keys = jax.vmap(fold_in, (0, None))(self.stream.keys, self.drawn)
        gumbels = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[1:]))(keys)
        # The largest perturbed logarithms come in the order of successive draws.
        return lax.top_k(jnp.log(probs) + gumbels, num)[1], after


def purpose_keys(
    stream: RowStream, lengths: Int[Array, "batch"]
) -> tuple[Key[Array, "batch"], Key[Array, "batch"], Key[Array, "batch"]]:
    """Keys of one iteration: to emit a token, to accept drafts, to propose them.

    The first comes first in ``at`` whatever the number asked for, so that plain decoding
    draws what gamma = 0 does.
    """
    return stream.at(lengths, 3)


def draft_draws(stream: Stream, lengths: Int[Array, "batch"], coupled: bool) -> Draws:
    """What a draft samples with in the iteration that starts at ``lengths``."""
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
    """The next token of each row in plain decoding."""
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
    """The token that the noise at each row's position chooses from ``probs``."""
    if settings.greedy:
        return argmax(probs)
    return gumbel_argmax(probs, stream.gumbels(positions, probs.shape[-1]))
