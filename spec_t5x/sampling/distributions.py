"""Standardized sampling: from logits to the distribution that is sampled.

Draft and target both go through ``standardize``: argmax, temperature, top-k and nucleus sampling
are all sampling from an adjusted distribution (Leviathan et al. 2023, section 2.2).

The order of operations and the treatment of ties are T5X's: temperature, then top-k or top-p; a
temperature of at most 1e-4 is argmax; tokens that tie with the last one kept are kept too. In
formulas p is the target's distribution and q the draft's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Shaped

from spec_t5x.errors import InputError, is_number, one_line
from spec_t5x.machine.operations import by_kernel
from spec_t5x.sampling.random_bits import uniform
from spec_t5x.sampling.rules import Places
from spec_t5x.types import Array, Float, Float32, Int, Key, UInt32

# Temperatures up to this one mean argmax, as in T5X.
MIN_TEMPERATURE = 1e-4


@flax.struct.dataclass
class Sampling:
    """Settings of the sampled distribution; ``sampling(...)`` makes and checks them.

    Numbers and rules' arrays are traced: new values compile nothing. The rest is static.
    """

    # One temperature for all rows, or one for each row; at most ``MIN_TEMPERATURE`` is argmax.
    temperature: Float32[Array, "*batch"]
    # Number of likeliest tokens that are kept; None keeps all.
    top_k: UInt32[Array, ""] | None = None
    # Least probability mass of the nucleus, the likeliest tokens that are kept; None keeps all.
    top_p: Float32[Array, ""] | None = None
    # True if every row is argmax, known when the program is traced: no noise is drawn.
    greedy: bool = flax.struct.field(pytree_node=False, default=False)
    # True if ``top_k`` is known to be 1, and noise chooses among the tokens that tie.
    ties: bool = flax.struct.field(pytree_node=False, default=False)
    # Rules of decoding, which callers apply to the logits before ``standardize``; None for none.
    rules: Callable[[Array, Places], Array] | None = None

    def repeat(self, times: int) -> "Sampling":
        """Returns the settings of a batch in which each row is followed by ``times - 1`` copies."""
        if self.temperature.ndim == 0:
            return self
        return dataclasses.replace(self, temperature=jnp.repeat(self.temperature, times))

    @property
    def cut(self) -> str | None:
        """Names what cuts the distribution: "ties", "top_k" or "top_p"; None if nothing does."""
        if self.ties:
            return "ties"
        return next((name for name in ("top_k", "top_p") if getattr(self, name) is not None), None)

    def keep_ties(self) -> "Sampling":
        """Returns settings with which ``top_k`` 1 draws among tied tokens, as in T5X."""
        # Rows at temperature 0 have no top_k: an argmax with one has top_k 1.
        if not self.greedy or self.top_k is None:
            return self
        return dataclasses.replace(self, greedy=False, ties=True)


def sampling(temperature=0.0, top_k: int = 0, top_p: float = 0.0, *, prefix: str = "") -> Sampling:
    """Returns checked sampling settings; ``prefix`` is that of their names in errors.

    Args:
      temperature: a number, or an array ``[batch]`` with one for each row; 0 is argmax.
      top_k: number of tokens kept, 0 for all. 1 is argmax: the first of tied tokens or, in
        coupled draws, the one that the noise chooses among them, as in T5X (``keep_ties``).
      top_p: least mass of the nucleus kept, in [0, 1]; 0 and 1 keep all.

    Raises:
      InputError: a value is out of its range, or both ``top_k`` and ``top_p`` are set.
    """
    values = np.asarray(temperature, np.float32) if _is_real(temperature) else np.float32(np.nan)
    if values.ndim > 1 or not np.all(np.isfinite(values)) or np.any(values < 0):
        given = f"{prefix}temperature is {one_line(temperature)}"
        raise InputError(f"{given}: give a number of at least 0 (0 is argmax)")
    if not is_one_number(top_k) or top_k < 0 or top_k % 1:
        raise InputError(
            f"{prefix}top_k is {top_k}: give a whole number of at least 0 (0 keeps all)"
        )
    if not (is_one_number(top_p) and 0 <= top_p <= 1):
        raise InputError(f"{prefix}top_p is {top_p}: give a number from 0 to 1 (0 keeps all)")
    top_p = float(top_p)
    if top_k and top_p:
        raise InputError(
            f"{prefix}top_k is {top_k} and {prefix}top_p is {top_p}: set one of them to 0"
        )
    cold = bool(np.all(values <= MIN_TEMPERATURE))
    return Sampling(
        temperature=jnp.asarray(values),
        # Filters that cannot change the result are left out of the compiled program.
        top_k=None if cold or not top_k else jnp.uint32(min(top_k, 2**31)),
        # XLA takes smaller ones for 0.
        top_p=None if cold or top_p in (0, 1) else jnp.float32(max(top_p, 1e-37)),
        greedy=cold or top_k == 1,
    )


def _is_real(value: Any) -> bool:
    """Tells whether a number, list or array has real numbers alone; True and False are none."""
    if isinstance(value, list | tuple):
        return all(map(_is_real, value))
    if hasattr(value, "dtype"):
        return any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating))
    return is_number(value)


def is_one_number(value: Any) -> bool:
    """Tells whether a value is one real number, perhaps in an array; True and False are none."""
    return _is_real(value) and np.ndim(value) == 0


def standardize(
    logits: Float[Array, "batch *positions vocab"], settings: Sampling
) -> Float32[Array, "batch *positions vocab"]:
    """Returns the sampled distributions in float32 (section 2.2); does not apply the rules."""
    logits = logits.astype(jnp.float32)
    if settings.greedy:
        return argmax_probs(logits)
    temperature = settings.temperature
    if temperature.ndim:
        temperature = temperature.reshape(-1, *[1] * (logits.ndim - 1))
    top_k = jnp.asarray(0 if settings.top_k is None else settings.top_k, jnp.uint32)
    top_p = jnp.asarray(0 if settings.top_p is None else settings.top_p, jnp.float32)
    return tempered(logits, temperature, top_k, top_p, cut=settings.cut)


@by_kernel
def tempered(
    logits: Float32[Array, "*rows vocab"],
    temperature: Array,
    top_k: UInt32[Array, ""],
    top_p: Float32[Array, ""],
    *,
    cut: str | None,
) -> Float32[Array, "*rows vocab"]:
    """Returns ``standardize``'s result for a temperature that broadcasts to ``logits``.

    ``cut`` is ``Sampling.cut``; ``top_k`` and ``top_p`` are 0 if they are not set.
    """
    warped = logits / jnp.maximum(temperature, MIN_TEMPERATURE)
    if cut == "ties":
        warped = jnp.where(warped >= jnp.max(warped, axis=-1, keepdims=True), warped, -jnp.inf)
    elif cut == "top_k":
        warped = keep_top_k(warped, top_k)
    probs = jax.nn.softmax(warped, axis=-1)
    if cut == "top_p":
        probs = keep_top_p(probs, top_p)
    return jnp.where(temperature > MIN_TEMPERATURE, probs, argmax_probs(logits))


@by_kernel
def log_sum_exp(values: Float32[Array, "*rows vocab"]) -> Float32[Array, "*rows"]:
    """Returns the logarithm of each row's sum of exponentials."""
    return jax.nn.logsumexp(values, axis=-1)


@by_kernel
def argmax(values: Float[Array, "*rows vocab"]) -> Int[Array, "*rows"]:
    """Returns the index of each row's largest value, the first index if several are equal.

    ``jnp.argmax`` is one scalar reduction over pairs; two plain reductions are vectorized and ten
    times faster on a CPU.
    """
    largest = jnp.max(values, axis=-1, keepdims=True)
    indices = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.min(jnp.where(values == largest, indices, values.shape[-1] - 1), axis=-1)


def values_at(
    values: Shaped[Array, "*rows vocab"], tokens: Int[Array, "*rows"]
) -> Shaped[Array, "*rows"]:
    """Returns ``values[row, tokens[row]]`` for each row."""
    return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]


def write_rows(
    buffer: Shaped[Array, "batch *length"],
    new: Shaped[Array, "batch *new"],
    starts: Int[Array, "batch"],
    axis: int = 1,
) -> Shaped[Array, "batch *length"]:
    """Returns ``buffer`` with each row b overwritten by ``new[b]`` from index ``starts[b]`` on.

    The caller leaves enough room along ``axis``: XLA moves a start back if a row would not fit.
    """
    if buffer.shape[0] == 1:
        # For one row a plain update in place; the batched form lowers to a scatter.
        return lax.dynamic_update_slice_in_dim(buffer, new, starts[0], axis)
    write = functools.partial(lax.dynamic_update_slice_in_dim, axis=axis - 1)
    return jax.vmap(write)(buffer, new, starts)


def argmax_probs(logits: Float[Array, "*rows vocab"]) -> Float32[Array, "*rows vocab"]:
    """Returns one-hot distributions: probability 1 for the token that ``argmax`` chooses."""
    return jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=jnp.float32)


def keep_top_k(logits: Float[Array, "*rows vocab"], k: Array) -> Float[Array, "*rows vocab"]:
    """Replaces logits below each row's k-th largest by minus infinity, so that ties are kept."""
    # Maps logits to unsigned integers in the same order; -0 becomes 0 first, so that both tie.
    bits = jnp.where(logits == 0, 0.0, logits).astype(jnp.float32)
    bits = lax.bitcast_convert_type(bits, jnp.uint32)
    numbers = bits ^ jnp.where(bits >> 31 == 1, jnp.uint32(0xFFFFFFFF), jnp.uint32(1 << 31))
    ones = jnp.ones((1,) * logits.ndim, jnp.uint32)
    return jnp.where(numbers >= _largest_threshold(numbers, ones, k), logits, -jnp.inf)


def keep_top_p(probs: Float32[Array, "*rows vocab"], p: Array) -> Float32[Array, "*rows vocab"]:
    """Returns the normalized nucleus: the fewest likeliest tokens of mass ``p``, and their ties."""
    # The bits of floats that are not negative, read as integers, have the order of the floats.
    bits = lax.bitcast_convert_type(probs, jnp.uint32)
    return normalize(jnp.where(bits >= _largest_threshold(bits, probs, p), probs, 0.0))


def _largest_threshold(
    numbers: UInt32[Array, "*rows vocab"], weights: Array, enough: Array
) -> UInt32[Array, "*rows 1"]:
    """Returns each row's largest t with ``sum(weights[numbers >= t]) >= enough``; 0 if none.

    The search is bit by bit: sorting the vocabulary takes 40 times longer on a CPU.
    """

    def set_bit(index, found):
        raised = found | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(numbers >= raised, weights, 0), axis=-1, keepdims=True)
        return jnp.where(weight >= enough, raised, found)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros_like(numbers[..., :1]))


def residual(
    target_probs: Float[Array, "*rows vocab"], draft_probs: Float[Array, "*rows vocab"]
) -> Float[Array, "*rows vocab"]:
    """Returns ``norm(max(0, p - q))``, from which a rejected draft is resampled (section 2.3).

    If p exceeds q for no token of a row, the row is p. Rounding alone causes that: a rejected token
    has ``q > p``, so that another token has ``p > q``.
    """
    excess = jnp.maximum(target_probs - draft_probs, 0.0)
    return jnp.where(jnp.any(excess > 0, axis=-1, keepdims=True), normalize(excess), target_probs)


def normalize(masses: Float[Array, "*rows vocab"]) -> Float[Array, "*rows vocab"]:
    """Divides each row by its sum; a row of zeros stays zeros."""
    total = jnp.sum(masses, axis=-1, keepdims=True)
    return masses / jnp.where(total > 0, total, 1.0)


@by_kernel
def overlap(
    target_probs: Float[Array, "*batch rows vocab"],
    draft_probs: Float[Array, "*batch drafts vocab"],
) -> Float[Array, "*batch drafts"]:
    """Returns ``beta = sum min(p, q)`` for each row of q (Theorem 3.5); p may have further rows."""
    return jnp.sum(jnp.minimum(target_probs[..., : draft_probs.shape[-2], :], draft_probs), axis=-1)


@by_kernel
def excess(
    factors: Float[Array, "*batch rows"],
    target_probs: Float[Array, "*batch rows vocab"],
    draft_probs: Float[Array, "*batch drafts vocab"],
) -> Float[Array, "*batch rows"]:
    """Returns ``sum max(factor p - q, 0)`` for each row of p; q is 0 in rows beyond its last."""
    missing = target_probs.shape[-2] - draft_probs.shape[-2]
    none = [(0, 0)] * (draft_probs.ndim - 2)
    draft_probs = jnp.pad(draft_probs, [*none, (0, missing), (0, 0)])
    return jnp.sum(jnp.maximum(factors[..., None] * target_probs - draft_probs, 0.0), axis=-1)


def check_float32(probs: Array, whose: str) -> None:
    """Raises ``InputError``, which begins with ``whose``, unless probabilities are float32.

    Rows of fewer bits do not sum to 1, and uniform numbers of that type are too coarse.
    """
    if probs.dtype != jnp.float32:
        raise InputError(
            f"{whose} are {probs.dtype}: compute them in float32, as distributions.standardize does"
        )


def sample(key: Key[Array, ""], probs: Float32[Array, "vocab"]) -> Int[Array, ""]:
    """Draws a token from a distribution; a token of probability 0 is never drawn.

    Inverts the cumulative distribution over blocks of about sqrt(vocab) tokens, then that within
    the chosen block. Two uniform numbers are 15 times faster on a CPU than Gumbel noise for every
    token, and resolve probabilities finer than one uniform number of 24 bits. Raises ``InputError``
    if the probabilities are not float32.
    """
    check_float32(probs, "probabilities to sample from")
    return sample_at(probs, uniform(key, 2))


def sample_residual(
    key: Key[Array, ""], target_probs: Float32[Array, "vocab"], draft_probs: Float32[Array, "vocab"]
) -> Int[Array, ""]:
    """Draws a token from ``residual(target_probs, draft_probs)``; p may sum to less than 1."""
    check_float32(target_probs, "the target's probabilities")
    check_float32(draft_probs, "the draft's probabilities")
    return sample_residual_at(target_probs, draft_probs, uniform(key, 2))


@by_kernel
def sample_at(probs: Float32[Array, "vocab"], uniforms: Float32[Array, "2"]) -> Int[Array, ""]:
    """Draws as ``sample``: the first uniform number chooses the block, the second the token."""
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
    """Draws a token from ``residual`` with two uniform numbers, as ``sample_at`` does."""
    return sample_at(residual(target_probs, draft_probs), uniforms)


def _invert(uniform: Float32[Array, ""], masses: Float32[Array, "n"]) -> Int[Array, ""]:
    """Returns the first index of positive mass whose cumulative sum exceeds ``uniform * total``.

    Indices without mass are excluded: XLA sums long arrays in parallel parts, whose rounding can
    raise the cumulative sum there.
    """
    cumulative = jnp.cumsum(masses)
    indices = jnp.arange(masses.shape[0], dtype=jnp.int32)
    possible = masses > 0
    exceeds = possible & (cumulative > uniform * cumulative[-1])
    # If rounding brings the product up to the total, nothing exceeds it.
    last = jnp.max(jnp.where(possible, indices, 0))
    return jnp.min(jnp.where(exceeds, indices, last))


def gumbel_argmax(
    probs: Float32[Array, "*rows vocab"], gumbels: Float32[Array, "*rows vocab"]
) -> Int[Array, "*rows"]:
    """Returns ``argmax(log(probs) + gumbels)`` of each row: a draw by the Gumbel-max trick.

    With the same noise, similar distributions mostly give the same token. A token of probability
    0 is never drawn.
    """
    check_float32(probs, "probabilities to sample from")
    return argmax(jnp.log(probs) + gumbels)
