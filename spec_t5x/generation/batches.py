"""Inputs as the device takes them: padded to shapes that recur, so that few are compiled."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.types import PAD_ID

# Place among all inputs (which random numbers depend on), text and ids.
Input = tuple[int, str, list[int]]
_SMALLEST_BUCKET = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs ready for the device, padded to shapes that recur."""

    # The real inputs; rows beyond them are padding.
    texts: list[str]
    tokens: np.ndarray  # [batch, source] int32
    # Start token, then what the output begins with; padded with 0.
    prompts: np.ndarray  # [batch, 1 + prompt length] int32
    keys: jax.Array  # [batch] keys
    # 0 for padding rows, which end at once.
    max_decode_steps: np.ndarray  # [batch] int32


def bucket(length: int, limit: int) -> int:
    """Pads the length of a source or prompt to the next power of two, at least 16.

    >>> [bucket(n, 96) for n in (3, 17, 60, 90)]
    [16, 32, 64, 96]
    """
    size = max(_SMALLEST_BUCKET, 1 << (int(length) - 1).bit_length())
    return max(length, min(size, limit))


@jax.jit
def random_keys(seed, places):
    """Returns a random key for each input, by its place among all."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.asarray(places))


def padded(ids: Sequence[list[int]], rows: int, width: int) -> np.ndarray:
    """Returns the ids of each row, then padding, ``[rows, width]``."""
    padded = np.full((rows, width), PAD_ID, np.int32)
    for row, row_ids in enumerate(ids):
        padded[row, : len(row_ids)] = row_ids
    return padded


def prompt_lengths(batch: Batch) -> list[int]:
    """Counts the tokens of each row's prompt after the start token."""
    return np.count_nonzero(np.asarray(batch.prompts)[:, 1:] != PAD_ID, axis=1).tolist()
