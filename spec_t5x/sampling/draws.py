"""Streams of random keys, and the draws that are made from them.

* ``RowStream`` has a key for each row. A row's draws depend on this key and on positions in the
  row's text alone, not on other rows, padding or the number of iterations.
* ``T5XStream`` is T5X's chain, one key for each step, whose noise covers the whole batch. With a
  coupled verifier, the only kind it serves, the texts are ``t5x.decoding.temperature_sample``'s.

A draft takes its tokens from ``Draws``. If the verifier is coupled, draft and target see the same
Gumbel noise at a position, so that they mostly choose the same token (arXiv 2408.07978). A token's
position is the number of tokens between the start token and the token.
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

# Number folded into a row's key before noise is drawn; ``RowStream.at`` folds smaller ones.
_NOISE = 0x6E6F6973


@flax.struct.dataclass
class RowStream:
    """Stream with a random key for each row."""

    keys: Key[Array, "batch"]

    def at(self, positions: Int[Array, "batch"], num: int) -> tuple[Key[Array, "batch"], ...]:
        """Returns ``num`` independent keys for each row's position, as ``num`` arrays of keys."""
        here = jax.vmap(fold_in)(self.keys, positions)
        # Not ``split``, whose keys may depend on how many there are. One call hashes all numbers,
        # which takes as long for one key as for hundreds.
        return tuple(jax.vmap(jax.vmap(fold_in, (0, None)), (None, 0))(here, jnp.arange(num)))

    def gumbels(
        self, positions: Int[Array, "batch"], vocab_size: int
    ) -> Float32[Array, "batch vocab"]:
        """Returns Gumbel noise for the token at each row's position, from that row's key."""

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
    # Position of the token that the first step generates, for each row.
    starts: Int[Array, "batch"]
    # True if all rows get the same noise, as in T5X if each row has its own temperature.
    same_for_rows: bool = flax.struct.field(pytree_node=False, default=False)

    def gumbels(
        self, positions: Int[Array, "batch"], vocab_size: int
    ) -> Float32[Array, "batch vocab"]:
        """Returns each row's Gumbel noise from T5X's step that generates the row's position."""
        batch = self.starts.shape[0]
        # Proposals of an ended row may be beyond the last step; nothing reads their noise.
        keys = self.steps.at[positions - self.starts].get(mode="clip")
        if self.same_for_rows:
            return jax.vmap(lambda key: jax.random.gumbel(key, (1, vocab_size))[0])(keys)
        rows = jnp.arange(batch, dtype=jnp.uint32)
        # Whether each number depends on key and index alone. A size that an export does not know
        # is small: its logits would take 16 GiB.
        is_small = not isinstance(batch, int) or batch * vocab_size <= 1 << 32
        high = jax.config.jax_high_dynamic_range_gumbel
        if is_small and is_threefry(self.steps) and not high:
            return jax.vmap(_gumbel_row, (0, 0, None))(keys, rows, vocab_size)
        # Rows may be at different steps, and a step's noise is ``[batch, vocab]``: a loop over the
        # rows holds the noise of one step at a time.
        noise = functools.partial(jax.random.gumbel, shape=(batch, vocab_size))
        return lax.map(lambda step: noise(step[0])[step[1]], (keys, rows))


def _gumbel_row(key: Key[Array, ""], row: UInt32[Array, ""], width: int) -> Float32[Array, "width"]:
    """Returns ``jax.random.gumbel(key, (rows, width))[row]`` without drawing the other rows."""
    indices = row * jnp.uint32(width) + jnp.arange(width, dtype=jnp.uint32)
    high, low = threefry2x32_p.bind(*jax.random.key_data(key), jnp.zeros_like(indices), indices)
    uniforms = jnp.maximum(fractions(high, low), jnp.finfo(jnp.float32).tiny)
    return -jnp.log(-jnp.log(uniforms))


Stream = RowStream | T5XStream


def t5x_stream(
    rng: Key[Array, ""], starts: Int[Array, "batch"], num_steps: int, same_for_rows: bool = False
) -> T5XStream:
    """Returns the chain of ``num_steps`` keys that T5X's sampling loop makes of ``rng``.

    ``rng`` is T5X's ``decode_rng``. ``starts`` are the lengths at which T5X's loop begins: those of
    the prompts, or zeros if T5X feeds the prompts token by token. T5X draws noise that is
    ``same_for_rows`` if each row has its own temperature.
    """

    def split(key, _):
        now, following = jax.random.split(key)
        return following, now

    _, steps = lax.scan(split, rng, length=num_steps)
    return T5XStream(steps=steps, starts=starts, same_for_rows=same_for_rows)


@flax.struct.dataclass
class Draws:
    """Source of a draft's random tokens, which are drawn one after the other.

        token, draws = draws.next(probs, settings)

    ``Draws`` are immutable: the same object gives the same token again. Continue with the returned
    object, in a loop as part of its carry, and give ``drawn`` of the last one to the ``Proposal``:
    tokens beyond that number do not count as proposed.
    """

    stream: Stream
    # Tokens that the rows hold; the first proposal goes to this position.
    lengths: Int[Array, "batch"]
    # Number of tokens drawn: the next proposal goes to position ``lengths + drawn``.
    drawn: Int[Array, ""] | int = 0
    # True if the target's tokens are chosen by the same noise (a coupled verifier).
    coupled: bool = flax.struct.field(pytree_node=False, default=False)

    def next(
        self, probs: Float32[Array, "batch vocab"], settings: Sampling
    ) -> tuple[Int[Array, "batch"], "Draws"]:
        """Draws a token from each row of ``probs``; returns the tokens and the next draws.

        ``probs`` come from ``standardize`` with ``settings``; greedy ones take the argmax.
        """
        check_float32(probs, "a draft's probabilities")
        positions, after = self.lengths + self.drawn, self.replace(drawn=self.drawn + 1)
        if self.coupled or settings.greedy:
            return sample_coupled(self.stream, positions, probs, settings), after
        return jax.vmap(sample)(jax.vmap(fold_in)(self.stream.keys, positions), probs), after

    def next_distinct(
        self,
        probs: Float32[Array, "batch nodes vocab"],
        logits: Float[Array, "batch nodes vocab"],
        num: int,
        settings: Sampling,
    ) -> tuple[Int[Array, "batch nodes num"], "Draws"]:
        """Draws ``num`` tokens without replacement, in order: the children of each node of a tree.

        ``probs`` are ``logits`` standardized with ``settings``; greedy ones take the ``num``
        largest logits. If fewer than ``num`` tokens have a probability above 0, others fill the
        result. ``drawn`` of the returned draws counts nodes, not tokens.
        """
        check_float32(probs, "a draft's probabilities")
        numbers = self.drawn + jnp.arange(probs.shape[1])
        after = self.replace(drawn=self.drawn + probs.shape[1])
        if settings.greedy:
            return lax.top_k(logits, num)[1], after
        keys = jax.vmap(jax.vmap(fold_in, (None, 0)), (0, None))(self.stream.keys, numbers)
        gumbels = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[2:])))(keys)
        # Gumbel-top-k: the largest sums, in order, are successive draws without replacement.
        return lax.top_k(jnp.log(probs) + gumbels, num)[1], after


def purpose_keys(
    stream: RowStream, lengths: Int[Array, "batch"]
) -> tuple[Key[Array, "batch"], Key[Array, "batch"], Key[Array, "batch"]]:
    """Returns each row's keys for an iteration: to emit a token, to accept drafts, to propose.

    Plain decoding uses the emitting key alone (``sample_next``), so that it draws the same tokens
    as speculative decoding at gamma 0.
    """
    return stream.at(lengths, 3)


def draft_draws(stream: Stream, lengths: Int[Array, "batch"], coupled: bool) -> Draws:
    """Returns a draft's ``Draws`` for the iteration in which rows hold ``lengths`` tokens."""
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
    """Draws the token of plain decoding that follows each row's ``lengths`` tokens."""
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
    """Returns each row's token by ``gumbel_argmax`` with its position's noise; argmax if greedy."""
    if settings.greedy:
        return argmax(probs)
    return gumbel_argmax(probs, stream.gumbels(positions, probs.shape[-1]))
