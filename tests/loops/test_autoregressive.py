"""Plain decoding, the baseline of every comparison, against decoding without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.labs.testing import laws
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.sampling.distributions import sampling
from spec_t5x.verifiers import CoupledVerifier
from tests.loops.stubs import counts_upwards, no_prompts, teacher_forced, texts
from tests.toy_drafts import StubTarget
from tests.toy_t5 import tiny_t5

pytestmark = pytest.mark.usefixtures("quick_compilation")

EOS = 1
GREEDY = sampling(0.0)
KEY = jax.random.key(0)


COUNTER = StubTarget(counts_upwards(8), 8)

# Exact arrays


def test_counting_up_to_the_end_of_sequence_and_to_the_limits():
    """Three prompts, end of sequence 5, at most 6 tokens and 3 steps.

    1. Nothing, at most 3 steps: 1 2 3, and no end of sequence yet.
    2. ``2``: 3 4 5, where 5 ends the row as its last step does.
    3. ``4 5``: the 5 was forced and ends nothing; 6 7, then 8, which is no token:
       all logits are equal, and 0 is the first of the largest.
    """
    decoded = autoregressive_decode(
        COUNTER,
        jnp.zeros((3, 1), jnp.int32),
        jnp.array([[0, 0, 0], [0, 2, 0], [0, 4, 5]]),
        KEY,
        GREEDY,
        max_decode_len=6,
        max_decode_steps=jnp.int32(3),
        eos_id=5,
        rescale_log_probs=False,
    )
    np.testing.assert_array_equal(
        decoded.tokens[:, 0],
        [[1, 2, 3, 0, 0, 0], [2, 3, 4, 5, 0, 0], [4, 5, 6, 7, 0, 0]],
    )
    np.testing.assert_array_equal(decoded.lengths[:, 0], [3, 4, 5])
    # log(e^9 / (e^9 + 7)) for each generated token; log(1/8) for the 0.
    sure = 9 - np.log(np.exp(9) + 7)
    np.testing.assert_allclose(
        decoded.scores[:, 0], [3 * sure, 3 * sure, 2 * sure - np.log(8)], atol=1e-5
    )
    assert decoded.stats is None


def test_options_of_speculation_are_refused():
    for option in ({"gamma": 2}, {"verifier": CoupledVerifier()}):
        with pytest.raises(TypeError, match="gamma|verifier"):
            autoregressive_decode(
                *(COUNTER, *[jnp.zeros((1, 1), jnp.int32)] * 2, KEY, GREEDY),
                max_decode_len=6,
                **option,
            )


# A T5 against teacher forcing

SOURCES = jnp.asarray(np.random.default_rng(0).integers(2, 30, (6, 7)), jnp.int32)
SOURCES = SOURCES.at[1, 4:].set(0).at[4, 2:].set(0)
LENGTH = 16


@functools.cache
def model():
    return tiny_t5(0)


def test_a_row_depends_neither_on_the_rows_beside_it_nor_on_padding():
    def decoded(sources, keys, temperatures):
        arguments = sources, no_prompts(len(sources)), keys, sampling(temperatures)
        return texts(autoregressive_decode(model(), *arguments, max_decode_len=LENGTH))

    keys = jax.random.split(KEY, 6)
    temperatures = np.array([0.0, 1.0, 0.5, 1.0, 0.0, 1.5], np.float32)
    together = decoded(SOURCES, keys, temperatures)
    order = np.array([4, 2, 5, 0, 3, 1])
    wider = jnp.pad(SOURCES, ((0, 0), (0, 5)))[order]
    moved = decoded(wider, keys[order], temperatures[order])
    assert moved == [together[row] for row in order]


def test_scores_are_of_the_sampled_distribution_if_rescaled():
    arguments = SOURCES, no_prompts(6), jax.random.split(KEY, 6), sampling(0.5)
    run = functools.partial(autoregressive_decode, model(), *arguments, max_decode_len=LENGTH)
    rescaled, plain = run(), run(rescale_log_probs=False)
    np.testing.assert_array_equal(rescaled.tokens, plain.tokens)
    prefixes = np.zeros((6, LENGTH), np.int32)
    prefixes[:, 1:] = rescaled.tokens[:, 0, :-1]
    logits = np.asarray(teacher_forced(model(), SOURCES, jnp.asarray(prefixes)), np.float64)
    is_text = np.arange(LENGTH)[None, :] < np.asarray(rescaled.lengths)
    for decoded, warped in [(rescaled, logits / 0.5), (plain, logits)]:
        log_probs = warped - np.logaddexp.reduce(warped, axis=-1, keepdims=True)
        of_tokens = np.take_along_axis(log_probs, np.asarray(decoded.tokens[:, 0])[..., None], -1)
        expected = np.sum(of_tokens[..., 0], axis=1, where=is_text)
        np.testing.assert_allclose(decoded.scores[:, 0], expected, atol=1e-4)


# The law


def test_sampled_texts_follow_the_enumerated_law():
    settings = sampling(1.2, top_p=0.9)
    sources, prompts, steps = laws.rows(laws.ROWS // len(laws.KINDS))
    options = {"max_decode_len": laws.LENGTH, "max_decode_steps": steps}
    decoded = autoregressive_decode(laws.target(), sources, prompts, KEY, settings, **options)
    statistic, threshold = laws.chi_square(jax.device_get(decoded), settings)
    assert statistic < threshold
