"""Plain and speculative decoding timed in turn."""

import jax
import numpy as np

from spec_t5x.generation import Batch
from spec_t5x.labs.benchmark.comparison import time_in_turn


def test_each_shape_of_prompts_is_compiled_before_it_is_timed(unchecked):
    """A language model's batches differ in their prompts alone."""
    batches = [
        Batch(
            texts=[""],
            tokens=np.zeros((1, 1), np.int32),
            prompts=np.zeros((1, length), np.int32),
            keys=jax.random.split(jax.random.key(0), 1),
            max_decode_steps=np.ones(1, np.int32),
        )
        for length in (3, 5, 3)
    ]
    lengths = []

    def decode(batch):
        lengths.append(batch.prompts.shape[1])
        return batch.prompts

    time_in_turn(lambda: decode, lambda: decode, [batches])
    # Each way decodes a batch of each shape twice, to compile, before the first round.
    assert lengths[:8] == [3, 5] * 4 and lengths[8:11] == [3, 5, 3]
