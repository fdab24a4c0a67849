"""Outputs of the decoding loops: prompts, ends, limits, scores and keys of rows, as in T5X."""

import functools
import operator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_t5x.errors import InputError
from spec_t5x.sampling.distributions import (
    MIN_TEMPERATURE,
    Sampling,
    log_sum_exp,
    values_at,
    write_rows,
)
from spec_t5x.types import PAD_ID, Array, Bool, EndOfSequence, Float32, Int, Key, PyTree

# The remedy for logits that are not finite.
UNSOUND = "check the weights, compute in float32, or loosen rules that exclude every token"


@flax.struct.dataclass
class Outputs:
    """Sequences being decoded, one a row; ``append`` writes up to ``room`` tokens at a time."""

    # Start token, prompt, generated tokens, then padding. The width is that of the longest output
    # plus ``room``, because a block is written whole, with padding for tokens not appended.
    sequences: Int[Array, "batch width"]
    # Tokens after the start token, the prompt's included.
    lengths: Int[Array, "batch"]
    # The prompts' lengths: tokens beyond them are generated.
    starts: Int[Array, "batch"]
    # The length at which a row ends without an end-of-sequence token.
    limits: Int[Array, "batch"]
    # Rows that have ended; they append nothing more.
    ended: Bool[Array, "batch"]
    # Sum of the natural log-probabilities of the generated tokens.
    scores: Float32[Array, "batch"]


@flax.struct.dataclass
class Decoded:
    """Finished sequences, in T5X's order: by increasing score within an input."""

    # Prompt, generated tokens (an end of sequence is the last), then padding; no start token.
    tokens: Int[Array, "inputs decodes length"]
    # Natural log-probability of the generated tokens; not finite if the target's logits were not
    # finite, and then the tokens are meaningless.
    scores: Float32[Array, "inputs decodes"]
    # Number of tokens, the prompt and the end-of-sequence token included.
    lengths: Int[Array, "inputs decodes"]
    # ``DecodeStats`` of each sequence; None if there was no draft.
    stats: Any = None
    # The pace after the batch, for decoding the next one; None if there was none.
    pace: Any = None


def start(
    prompts: Int[Array, "batch width"],
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None,
    room: int,
) -> Outputs:
    """Returns rows of ``prompts``; they end at ``max_decode_len`` or after ``max_decode_steps``."""
    batch = prompts.shape[0]
    lengths = prompt_lengths(prompts)
    limits = jnp.full(batch, max_decode_len, jnp.int32)
    if max_decode_steps is not None:
        limits = lengths + jnp.minimum(limits - lengths, max_decode_steps)
    sequences = jnp.full((batch, 1 + max_decode_len + room), PAD_ID, jnp.int32)
    return Outputs(
        sequences=lax.dynamic_update_slice(sequences, prompts, (0, 0)),
        lengths=lengths,
        starts=lengths,
        limits=limits,
        ended=lengths >= limits,
        scores=jnp.zeros(batch, jnp.float32),
    )


def prompt_lengths(prompts: Int[Array, "batch width"]) -> Int[Array, "batch"]:
    """Counts the tokens of each row that are neither its start token nor padding."""
    return jnp.sum(prompts[:, 1:] != PAD_ID, axis=1, dtype=jnp.int32)


def ends(tokens: Int[Array, "*shape"], eos_id: EndOfSequence) -> Bool[Array, "*shape"]:
    """Tells which tokens are ``eos_id`` or, if that is a tuple, one of its ids."""
    ids = eos_id if isinstance(eos_id, tuple) else (eos_id,)
    return functools.reduce(operator.or_, [tokens == one for one in ids])


def token_log_probs(
    logits: Float32[Array, "batch new vocab"],
    probs: Float32[Array, "batch new vocab"],
    tokens: Int[Array, "batch new"],
    settings: Sampling,
    rescale_log_probs: bool,
) -> Float32[Array, "batch new"]:
    """Returns the natural log-probability of each token.

    ``logits`` are the target's, and ``probs`` the same after ``standardize``. With
    ``rescale_log_probs`` tokens are scored under the sampled distribution, in which an argmax token
    has 0, otherwise under the softmax of the logits. If the largest logit of a position is not
    finite, its token means nothing, and the log-probability is not finite either.
    """
    if not rescale_log_probs:
        return values_at(logits, tokens) - log_sum_exp(logits)
    is_sound = jnp.isfinite(jnp.max(logits, axis=-1))
    if settings.greedy:
        rescaled = jnp.float32(0.0)
    else:
        rescaled = jnp.log(values_at(probs, tokens))
        if settings.temperature.ndim:
            # A token that lenience accepted at temperature 0 has 0, as if all rows were greedy.
            at_argmax = settings.temperature <= MIN_TEMPERATURE
            rescaled = jnp.where(at_argmax[:, None], 0.0, rescaled)
    return jnp.where(is_sound, rescaled, jnp.nan)


def append(
    outputs: Outputs,
    tokens: Int[Array, "batch room"],
    counts: Int[Array, "batch"],
    log_probs: Float32[Array, "batch room"],
    eos_id: EndOfSequence,
) -> tuple[Outputs, Int[Array, "batch"]]:
    """Appends the first ``counts[b]`` tokens to each row that has not ended.

    A row ends at its first end-of-sequence token or at its limit; tokens beyond are not appended.
    Returns the rows, and the number of tokens appended to each.
    """
    room = tokens.shape[1]
    offsets = jnp.arange(room)[None, :]
    first_eos = jnp.min(jnp.where(ends(tokens, eos_id), offsets, room), axis=1)
    taken = jnp.minimum(jnp.minimum(counts, first_eos + 1), outputs.limits - outputs.lengths)
    taken = jnp.where(outputs.ended, 0, taken)
    is_taken = offsets < taken[:, None]

    lengths = outputs.lengths + taken
    ended = outputs.ended | (first_eos < taken) | (lengths >= outputs.limits)
    tokens = jnp.where(is_taken, tokens, PAD_ID)
    sequences = write_rows(outputs.sequences, tokens, outputs.lengths + 1)
    # One by one, as in plain decoding: a sum in another order would sort decodes in another one.
    scores = functools.reduce(operator.add, jnp.where(is_taken, log_probs, 0.0).T, outputs.scores)
    return outputs.replace(sequences=sequences, lengths=lengths, ended=ended, scores=scores), taken


def finish(
    outputs: Outputs, num_decodes: int, max_decode_len: int, stats=None, pace=None
) -> Decoded:
    """Returns rows without start tokens, grouped by input and sorted by increasing score."""

    def group(rows):
        # Not -1, which is ambiguous if an axis has size 0 (statistics at gamma 0).
        return rows.reshape(rows.shape[0] // num_decodes, num_decodes, *rows.shape[1:])

    scores = group(outputs.scores)
    # T5X takes the last decode as the best, so NaN scores sort first.
    order = jnp.argsort(jnp.where(jnp.isnan(scores), -jnp.inf, scores), axis=1, stable=True)

    def arrange(rows):
        return jax.vmap(lambda row, indices: row[indices])(group(rows), order)

    return Decoded(
        tokens=arrange(outputs.sequences[:, 1 : 1 + max_decode_len]),
        scores=arrange(outputs.scores),
        lengths=arrange(outputs.lengths),
        stats=jax.tree.map(arrange, stats),
        pace=pace,
    )


def repeat_rows(tree: PyTree, times: int) -> PyTree:
    """Repeats each row of all arrays; the ``times`` copies of a row are consecutive.

    A node of the tree that has a method ``repeat_rows(times)`` is replaced by its result.
    """
    if times == 1:
        return tree

    def repeat(node):
        own = getattr(node, "repeat_rows", None)
        return jnp.repeat(node, times, axis=0) if own is None else own(times)

    return jax.tree.map(repeat, tree, is_leaf=lambda node: hasattr(node, "repeat_rows"))


def row_keys(rng: Key[Array, "*batch"], batch: int, num_decodes: int = 1) -> Key[Array, "rows"]:
    """Returns a key for each of ``batch * num_decodes`` rows, in the order of ``repeat_rows``.

    From a single key, input b gets ``fold_in(rng, b)``; with a key for each input, an output does
    not depend on the input's index in the batch.
    """
    if rng.ndim == 0:
        rng = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(batch))
    if num_decodes == 1:
        return rng
    fold_decodes = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(fold_decodes, (0, None))(rng, jnp.arange(num_decodes)).reshape(-1)


def check_sound(scores: Float32[np.ndarray, "rows"]) -> None:
    """Raises ``InputError``, with a row's index, if the score of that row is not finite."""
    for row in np.flatnonzero(~np.isfinite(scores)):
        raise InputError(
            f"the target's logits are not finite in row {row} (score {scores[row]}): {UNSOUND}"
        )
