"""Batches of inputs, padded to a few shapes so that few programs are compiled."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.sampling.random_bits import THREEFRY
from spec_t5x.types import PAD_ID

# Place (the index among all inputs, on which random numbers depend), text and ids.
Input = tuple[int, str, list[int]]
_SMALLEST_BUCKET = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs of one call of a loop, and padding rows after them."""

    # Texts of the inputs; empty strings for inputs that are ids. Padding rows have none.
    texts: list[str]
    tokens: np.ndarray  # [batch, source] int32
    # Start token and prompt, padded with 0.
    prompts: np.ndarray  # [batch, 1 + prompt length] int32
    keys: jax.Array  # [batch] keys
    # Tokens to generate at most; 0 for padding rows, which end at once.
    max_decode_steps: np.ndarray  # [batch] int32


def bucket(length: int, limit: int) -> int:
    """Returns the next power of two from 16 up, at most ``limit`` and at least ``length``.

    >>> [bucket(n, 96) for n in (3, 17, 60, 90)]
    [16, 32, 64, 96]
    """
    size = max(_SMALLEST_BUCKET, 1 << (int(length) - 1).bit_length())
    return max(length, min(size, limit))


@jax.jit
def random_keys(seed, places):
    """Returns a random key for each input, from the seed and its place."""
    return jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(seed, impl=THREEFRY), jnp.asarray(places)
    )


def padded(ids: Sequence[list[int]], rows: int, width: int) -> np.ndarray:
    """Returns ids ``[rows, width]`` padded on the right; rows beyond the given ones are padding."""
    padded = np.full((rows, width), PAD_ID, np.int32)
    for row, row_ids in enumerate(ids):
        padded[row, : len(row_ids)] = row_ids
    return padded


def prompt_lengths(batch: Batch) -> list[int]:
    """Counts the tokens of each row's prompt after the start token."""
    return np.count_nonzero(np.asarray(batch.prompts)[:, 1:] != PAD_ID, axis=1).tolist()
