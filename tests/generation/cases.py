"""Texts, options and comparisons that tests of generation share."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.generation import GenerateOptions
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.types import PAD_ID
from tests.loops.stubs import teacher_forced

# Up to 16 tokens each: one program serves them all.
TEXTS = ["My sister", "Wir gehen morgen.", "Der alte Tisch", "a green bird", "It is wet."]
# Ends at once, at temperature 0.
ENDS = "Die Katze"
# Padded to 32.
LONGER = "The children play football after school."


def options(**changes) -> GenerateOptions:
    return GenerateOptions(**{"gamma": 3, "max_decode_len": 16} | changes)


GREEDY = options()
SAMPLED = options(temperature=1.0, seed=3)


def texts_of(generations) -> list[str]:
    return [group[0].output for group in generations]


def assert_same(generations, expected):
    """Compares all of it, and scores to rounding: the shapes of the products differ."""
    for ours, theirs in zip(generations, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-3)
            same_score = dataclasses.replace(other, score=one.score)
            if one.alpha is not None:
                assert one.alpha == pytest.approx(other.alpha, abs=1e-3)
                same_score = dataclasses.replace(same_score, alpha=one.alpha)
            assert one == same_score


def token_logits(model: T5Model, source: list[int], output: list[int]) -> np.ndarray:
    """Returns the logits before each token of an output, teacher-forced ``[length, vocab]``."""
    texts = [*source, *[PAD_ID] * (16 - len(source))], [PAD_ID, *output, *[PAD_ID] * 16][:16]
    logits = teacher_forced(model, *(jnp.asarray([text]) for text in texts))
    return np.asarray(logits[0, : len(output)], np.float64)
