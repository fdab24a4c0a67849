"""From logits to the distribution that is sampled ("standardized sampling", 2.2).

Draft and target both go through ``standardize``, so every later module deals with
plain probabilities: argmax, temperature, top-k and nucleus sampling are all
sampling from an adjusted distribution (Leviathan et al. 2023, section 2.2).

The order of operations and the treatment of ties are T5X's: temperature, then
top-k or top-p; a temperature below 1e-4 is argmax; tokens that tie with the last
one kept are kept too.
"""

import dataclasses
import functools
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Shaped

from spec_t5x.errors import InputError
from spec_t5x.machine.operations import by_kernel
from spec_t5x.sampling.random_bits import uniform
from spec_t5x.sampling.rules import Rules
from spec_t5x.types import Array, Float, Float32, Int, Key, UInt32

# Temperatures up to this one mean argmax, as in T5X.
MIN_TEMPERATURE = 1e-4


@flax.struct.dataclass
class Sampling:
    """How logits become the sampled distribution. Make one with ``sampling(...)``.

    A pytree: the temperature is traced, so that changing it compiles nothing; the
    rest is part of the program.
    """

    # One temperature for all rows, or one for each row.
    temperature: Float32[Array, "*batch"]
    # Keep the k likeliest tokens; 0 keeps all.
    top_k: int = flax.struct.field(pytree_node=False, default=0)
    # Keep the smallest set of tokens with at least this mass; 0 keeps all.
    top_p: float = flax.struct.field(pytree_node=False, default=0.0)
    # Every row is known to be argmax while tracing: no noise is drawn for it.
    greedy: bool = flax.struct.field(pytree_node=False, default=False)
    # Which tokens may follow a text: applied to the logits before all else (``rules.Places``).
    rules: Rules | None = None

    def repeat(self, times: int) -> "Sampling":
        """The settings of ``times`` consecutive copies of each row."""
        if self.temperature.ndim == 0:
            return self
        return dataclasses.replace(self, temperature=jnp.repeat(self.temperature, times))

    def keep_ties(self) -> "Sampling":
        """The same, with a draw among tokens that tie for ``top_k`` 1, as T5X has it."""
        return dataclasses.replace(self, greedy=self.greedy and self.top_k != 1)


def sampling(temperature=0.0, top_k: int = 0, top_p: float = 0.0) -> Sampling:
    """Checked sampling settings.

    Args:
      temperature: a number, or an array ``[batch]`` with one for each row.
      top_k: number of tokens kept, 0 for all. 1 is argmax, the first of tokens that tie
        exactly; coupled draws choose among those by their noise, as T5X does.
      top_p: mass of the nucleus kept, in [0, 1]; 0 and 1 keep all.

    Raises:
      InputError: a negative or non-finite temperature, a negative ``top_k``,
        ``top_p`` outside [0, 1], or both ``top_k`` and ``top_p``.
    """
    values = np.asarray(temperature, np.float32)
    if values.ndim > 1 or not np.all(np.isfinite(values)) or np.any(values < 0):
        raise InputError(
            f"temperature is {temperature}: give a finite number of at least 0 (0 is argmax)"
        )
    if top_k < 0 or int(top_k) != top_k:
        raise InputError(f"top_k is {top_k}: give a whole number of at least 0 (0 keeps all)")
    if not 0 <= top_p <= 1:
        raise InputError(f"top_p is {top_p}: give a number from 0 to 1 (0 keeps all)")
    if top_k and top_p:
        raise InputError(f"top_k is {top_k} and top_p is {top_p}: set one of them to 0")
    cold = bool(np.all(values <= MIN_TEMPERATURE))
    return Sampling(
        temperature=jnp.asarray(values),
        # Without what changes nothing.
        top_k=0 if cold else int(top_k),
        top_p=0.0 if cold or top_p == 1 else float(top_p),
        greedy=cold or top_k == 1,
    )


def standardize(
    logits: Float[Array, "batch *positions vocab"], settings: Sampling
) -> Float32[Array, "batch *positions vocab"]:
    """The distribution that ``settings`` sample from, in float32 (section 2.2)."""
    logits = logits.astype(jnp.float32)
    if settings.greedy:
        return argmax_probs(logits)
    temperature = settings.temperature
    if temperature.ndim:
        temperature = temperature.reshape(-1, *[1] * (logits.ndim - 1))
    return tempered(logits, temperature, top_k=settings.top_k, top_p=settings.top_p)


@by_kernel
def tempered(
    logits: Float32[Array, "*rows vocab"], temperature: Array, *, top_k: int, top_p: float
) -> Float32[Array, "*rows vocab"]:
    """Softmax at a temperature, which broadcasts to the logits, of the tokens that are kept."""
    warped = logits / jnp.maximum(temperature, MIN_TEMPERATURE)
    if top_k:
        warped = keep_top_k(warped, top_k)
    probs = jax.nn.softmax(warped, axis=-1)
    if top_p:
        probs = keep_top_p(probs, top_p)
    return jnp.where(temperature > MIN_TEMPERATURE, probs, argmax_probs(logits))


@by_kernel
def log_sum_exp(values: Float32[Array, "*rows vocab"]) -> Float32[Array, "*rows"]:
    """``log sum exp`` of each row: what makes log-probabilities of logits."""
    return jax.nn.logsumexp(values, axis=-1)


@by_kernel
def argmax(values: Float[Array, "*rows vocab"]) -> Int[Array, "*rows"]:
    """Index of the largest value, the first of several.

    ``jnp.argmax`` carries value and index through one scalar reduction; two plain
    reductions are vectorized and ten times faster on a CPU.
    """
    largest = jnp.max(values, axis=-1, keepdims=True)
    last = values.shape[-1] - 1
    indices = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.min(jnp.where(values == largest, indices, last), axis=-1)


def values_at(
    values: Shaped[Array, "*rows vocab"], tokens: Int[Array, "*rows"]
) -> Shaped[Array, "*rows"]:
    """Each row's value at its token."""
    return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]


def write_rows(
    buffer: Shaped[Array, "batch *length"],
    new: Shaped[Array, "batch *new"],
    starts: Int[Array, "batch"],
    axis: int = 1,
) -> Shaped[Array, "batch *length"]:
    """Overwrites each row of ``buffer`` with its row of ``new``, from its own start on.

    The caller sees to the room: XLA moves a start back whose row would run over the end.
    """
    write = functools.partial(lax.dynamic_update_slice_in_dim, axis=axis - 1)
    return jax.vmap(write)(buffer, new, starts)


def argmax_probs(logits: Float[Array, "*rows vocab"]) -> Float32[Array, "*rows vocab"]:
    """All mass on the likeliest token (the first of several)."""
    return jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=jnp.float32)


def keep_top_k(logits: Float[Array, "*rows vocab"], k: int) -> Float[Array, "*rows vocab"]:
    """Minus infinity for all but the k largest logits and what ties with them.

    Searches the threshold among bit patterns: ``lax.top_k`` sorts the vocabulary on a CPU.
    """
    if k >= logits.shape[-1]:
        return logits
    logits = logits.astype(jnp.float32)
    if k == 1:
        smallest_kept = jnp.max(logits, axis=-1, keepdims=True)
    else:
        ones = jnp.ones((1,) * logits.ndim, jnp.int32)
        threshold = _largest_threshold(_ordered(logits), ones, k)
        smallest_kept = _unordered(threshold)
    return jnp.where(logits >= smallest_kept, logits, -jnp.inf)


def _ordered(values: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Whole numbers in the order of the values: bit patterns, the negative ones backwards."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    return bits ^ jnp.where(bits >> 31 == 1, jnp.uint32(0xFFFFFFFF), jnp.uint32(1 << 31))


def _unordered(numbers: UInt32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The inverse of ``_ordered``."""
    flipped = jnp.where(numbers >> 31 == 1, jnp.uint32(1 << 31), jnp.uint32(0xFFFFFFFF))
    return lax.bitcast_convert_type(numbers ^ flipped, jnp.float32)


def keep_top_p(probs: Float32[Array, "*rows vocab"], p: float) -> Float32[Array, "*rows vocab"]:
    """The nucleus: the likeliest tokens whose mass reaches ``p``, normalised.

    Searches the threshold among the bit patterns of float32, which order like the numbers
    they stand for as long as these are not negative, instead of sorting the vocabulary.
    """
    bits = lax.bitcast_convert_type(probs, jnp.uint32)
    return normalize(jnp.where(bits >= _largest_threshold(bits, probs, p), probs, 0.0))


def _largest_threshold(
    numbers: UInt32[Array, "*rows vocab"], weights: Array, enough: float | int | Array
) -> UInt32[Array, "*rows 1"]:
    """The largest t for which the numbers from t on weigh ``enough`` together; 0 if none do."""
    # A pass over the vocabulary waits for the one before it: an accelerator sums for 15
    # thresholds in one. On a CPU it is the sums that take time.
    return lax.platform_dependent(
        numbers,
        weights,
        enough,
        cpu=functools.partial(_search_threshold, bits=1),
        default=functools.partial(_search_threshold, bits=4),
    )


def _search_threshold(numbers, weights, enough, *, bits: int):
    """``_largest_threshold`` in ``32 / bits`` passes, each of which finds so many bits of it."""
    digits = jnp.arange(1, 1 << bits, dtype=jnp.uint32)
    digits = digits.reshape((1,) * (numbers.ndim - 1) + (-1,))

    def narrow(index, found):
        shift = jnp.uint32(32) - jnp.uint32(bits) * (index + 1).astype(jnp.uint32)
        thresholds = found | (digits << shift)
        # A fused reduction: neither what is compared nor what is summed takes memory.
        kept = numbers[..., None, :] >= thresholds[..., None]
        sums = jnp.sum(jnp.where(kept, weights[..., None, :], 0), axis=-1)
        digit = jnp.sum(sums >= enough, axis=-1, keepdims=True, dtype=jnp.uint32)
        return found | (digit << shift)

    found = jnp.zeros((*numbers.shape[:-1], 1), jnp.uint32)
    return lax.fori_loop(0, 32 // bits, narrow, found)


def residual(
    target_probs: Float[Array, "*rows vocab"], draft_probs: Float[Array, "*rows vocab"]
) -> Float[Array, "*rows vocab"]:
    """``norm(max(0, p - q))``: what a rejected draft is resampled from (2.3).

    A draft is only rejected where the target has mass that the draft lacks, so a
    residual without mass comes from rounding alone; the target itself stands in.
    """
    excess = jnp.maximum(target_probs - draft_probs, 0.0)
    return jnp.where(jnp.any(excess > 0, axis=-1, keepdims=True), normalize(excess), target_probs)


def normalize(masses: Float[Array, "*rows vocab"]) -> Float[Array, "*rows vocab"]:
    """Divides by the sum; zeros stay zeros."""
    total = jnp.sum(masses, axis=-1, keepdims=True)
    return masses / jnp.where(total > 0, total, 1.0)


@by_kernel
def overlap(
    target_probs: Float[Array, "*batch rows vocab"],
    draft_probs: Float[Array, "*batch drafts vocab"],
) -> Float[Array, "*batch drafts"]:
    """``beta = sum min(p, q) = 1 - D_LK(p, q)`` for each of the draft's rows (Theorem 3.5).

    The target may have more rows, which are not looked at.
    """
    beside = target_probs[..., : draft_probs.shape[-2], :]
    return jnp.sum(jnp.minimum(beside, draft_probs), axis=-1)


@by_kernel
def excess(
    factors: Float[Array, "*batch rows"],
    target_probs: Float[Array, "*batch rows vocab"],
    draft_probs: Float[Array, "*batch drafts vocab"],
) -> Float[Array, "*batch rows"]:
    """``sum max(f p - q, 0)`` for each row, f its factor; q is zero after the draft's rows."""
    missing = target_probs.shape[-2] - draft_probs.shape[-2]
    none = [(0, 0)] * (draft_probs.ndim - 2)
    draft_probs = jnp.pad(draft_probs, [*none, (0, missing), (0, 0)])
    return jnp.sum(jnp.maximum(factors[..., None] * target_probs - draft_probs, 0.0), axis=-1)


def check_float32(probs: Array, whose: str) -> None:
    """Raises ``InputError``, while tracing, for probabilities in another type than float32.

    Rounded to fewer bits they are not those that a token is drawn from: rows no longer sum
    to 1, and the uniform numbers to draw with would be as coarse.
    """
    if probs.dtype != jnp.float32:
        raise InputError(
            f"{whose} are {probs.dtype}: work them out in float32, as "
            "distributions.standardize does"
        )


def sample(key: Key[Array, ""], probs: Float32[Array, "vocab"]) -> Int[Array, ""]:
    """One token from a distribution; a token of probability zero is never drawn.

    Inverts the distribution function twice: for a block of about sqrt(vocab) tokens,
    then for a token in it. Two uniform numbers and two sums replace the Gumbel noise
    of every token (15 times slower on a CPU), and resolve probabilities finer than
    one uniform of 24 bits could.

    Raises:
      InputError: probabilities that are not float32.
    """
    check_float32(probs, "probabilities to sample from")
    return sample_at(probs, _two_uniforms(key))


def sample_residual(
    key: Key[Array, ""],
    target_probs: Float32[Array, "vocab"],
    draft_probs: Float32[Array, "vocab"],
) -> Int[Array, ""]:
    """One token of ``residual(target_probs, draft_probs)``, which need not sum to 1."""
    check_float32(target_probs, "the target's probabilities")
    check_float32(draft_probs, "the draft's probabilities")
    return sample_residual_at(target_probs, draft_probs, _two_uniforms(key))


def _two_uniforms(key: Key[Array, ""]) -> Float32[Array, "2"]:
    """For a block, and for a token in it."""
    return uniform(key, 2)


@by_kernel
def sample_at(probs: Float32[Array, "vocab"], uniforms: Float32[Array, "2"]) -> Int[Array, ""]:
    """``sample`` by two uniform numbers."""
    vocab = probs.shape[0]
    width = max(1, math.isqrt(vocab))
    blocks = jnp.pad(probs, (0, -vocab % width)).reshape(-1, width)
    block = _invert(uniforms[0], jnp.sum(blocks, axis=1))
    return block * width + _invert(uniforms[1], blocks[block])


@by_kernel
def sample_residual_at(
    target_probs: Float32[Array, "vocab"],
    draft_probs: Float32[Array, "vocab"],
    uniforms: Float32[Array, "2"],
) -> Int[Array, ""]:
    """``sample_residual`` by two uniform numbers."""
    return sample_at(residual(target_probs, draft_probs), uniforms)


def _invert(uniform: Float32[Array, ""], masses: Float32[Array, "n"]) -> Int[Array, ""]:
    """The first index whose cumulative mass exceeds ``uniform`` of the total.

    Only an index with a mass of its own: XLA sums long arrays in parallel parts, whose
    rounding lets the cumulative sum move, up or down, where nothing is added.
    """
    cumulative = jnp.cumsum(masses)
    indices = jnp.arange(masses.shape[0], dtype=jnp.int32)
    possible = masses > 0
    exceeds = possible & (cumulative > uniform * cumulative[-1])
    # Rounding may bring the product up to the total, which nothing exceeds.
    last = jnp.max(jnp.where(possible, indices, 0))
    return jnp.min(jnp.where(exceeds, indices, last))


def gumbel_argmax(
    probs: Float32[Array, "*rows vocab"], gumbels: Float32[Array, "*rows vocab"]
) -> Int[Array, "*rows"]:
    """The token that Gumbel noise chooses: a draw from ``probs``, fixed by the noise.

    Two distributions that are alike mostly choose alike under the same noise. A token
    of probability zero is never chosen.
    """
    check_float32(probs, "probabilities to sample from")
    # Minus infinity, whatever the noise.
    return argmax(jnp.log(probs) + gumbels)
