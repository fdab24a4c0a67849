"""The packaged heads, on the packaged target."""

import numpy as np
import pytest

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.own.target_drafts import load_heads
from spec_t5x.drafts.heads import MedusaDraft
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.loops.speculative import speculative_decode

SENTENCES = ["Where is the station?", "This package contains the documentation.", "I am tired."]


@pytest.fixture(scope="module")
def heads():
    return load_heads("ende-heads", load("ende-target"))


def test_same_text_in_fewer_calls(heads):
    generator = Generator.load("ende-target")
    options = GenerateOptions(gamma=4, batch_size=4, max_decode_len=32)
    (batch,) = generator.batches(SENTENCES, options)
    decoded = speculative_decode(
        generator.target,
        MedusaDraft.create(heads.params, generator.target),
        batch.tokens,
        np.zeros((4, 1), np.int32),
        batch.keys,
        options.sampling(),
        gamma=4,
        max_decode_len=32,
        max_decode_steps=batch.max_decode_steps,
    )
    plain = generator.decode(batch, options)
    np.testing.assert_array_equal(decoded.tokens, plain.tokens)
    calls, tokens = np.sum(decoded.stats.target_calls), np.sum(plain.lengths)
    # A call adds one token and what was accepted; the last ones may add less.
    assert np.sum(decoded.stats.accepted) >= tokens - calls > 0.2 * calls
