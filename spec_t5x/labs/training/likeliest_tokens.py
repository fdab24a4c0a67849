"""Tokens that a narrow head keeps: the most frequent ones of the training texts."""

import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.types import EOS_ID, PAD_ID, Array, Int


def check_number(number: int, vocab_size: int) -> None:
    """Raises ``InputError`` unless a number of known tokens is from 1 to ``vocab_size - 1``."""
    if not 1 <= number < vocab_size:
        raise InputError(
            f"a narrow head of {number} of {vocab_size} tokens: give 1 to {vocab_size - 1}"
        )


def likeliest_ids(tokens: Int[Array, "tokens"], number: int, vocab_size: int) -> np.ndarray:
    """Returns the ``number`` ids most frequent in ``tokens``, with EOS, without padding, sorted.

    Raises:
        InputError: ``number`` is not from 1 to ``vocab_size - 1``.
    """
    check_number(number, vocab_size)
    counts = np.bincount(np.asarray(tokens), minlength=vocab_size)
    counts[PAD_ID], counts[EOS_ID] = -1, counts.max() + 1
    # Vocabularies are sorted by frequency: lower ids win ties.
    return np.sort(np.argsort(-counts, kind="stable")[:number]).astype(np.int32)
