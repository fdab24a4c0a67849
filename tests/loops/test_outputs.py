"""Rows being written: end of sequence, limits, prompts, order, keys and scores."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.loops import arguments
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.sampling.distributions import sampling, standardize
from tests.loops.stubs import bits

pytestmark = pytest.mark.usefixtures("quick_compilation")

EOS = 1
ROOM = 4

# Compiled, as in the loops; one program for each shape.
START = jax.jit(outputs_lib.start, static_argnums=(1, 3))
APPEND = jax.jit(outputs_lib.append, static_argnums=4)
FINISH = jax.jit(outputs_lib.finish, static_argnums=(1, 2))
ROW_KEYS = jax.jit(outputs_lib.row_keys, static_argnums=(1, 2))


def empty(batch, max_decode_len=10, max_decode_steps=None, room=ROOM):
    """Makes rows that hold the start token only."""
    steps = None if max_decode_steps is None else jnp.asarray(max_decode_steps, jnp.int32)
    return START(jnp.zeros((batch, 1), jnp.int32), max_decode_len, steps, room)


def append(outputs, tokens, counts=None, log_probs=None):
    """Appends plain lists; by default whole blocks, of log-probability -1."""
    tokens = jnp.asarray(tokens, jnp.int32)
    counts = [tokens.shape[1]] * len(tokens) if counts is None else counts
    log_probs = -np.ones(tokens.shape) if log_probs is None else log_probs
    return APPEND(
        outputs,
        tokens,
        jnp.asarray(counts, jnp.int32),
        jnp.asarray(log_probs, jnp.float32),
        EOS,
    )


def texts(outputs):
    """Returns the tokens after the start token of each row, by its length."""
    return [
        row[1 : 1 + length].tolist()
        for row, length in zip(np.asarray(outputs.sequences), outputs.lengths, strict=True)
    ]


# append


def test_each_row_takes_its_count_of_tokens():
    outputs, taken = append(empty(5), [[5, 6, 7, 8]] * 5, counts=[0, 1, 2, 3, 4])
    np.testing.assert_array_equal(taken, [0, 1, 2, 3, 4])
    assert texts(outputs) == [[5, 6, 7, 8][:n] for n in range(5)]
    np.testing.assert_array_equal(outputs.scores, [0, -1, -2, -3, -4])
    assert not np.any(outputs.ended)


@pytest.mark.parametrize("counts", [1, 4])
def test_end_of_sequence_at_every_offset_ends_the_row_there(counts):
    # Row i has EOS at offset i, the last one has none; more tokens come behind it.
    block = np.full((ROOM + 1, ROOM), 7)
    block[np.arange(ROOM), np.arange(ROOM)] = EOS
    outputs, taken = append(empty(ROOM + 1), block, [counts] * (ROOM + 1))
    expected = [min(counts, offset + 1) for offset in range(ROOM)] + [counts]
    np.testing.assert_array_equal(taken, expected)
    np.testing.assert_array_equal(outputs.lengths, expected)
    # EOS beyond the count is not appended and ends nothing.
    np.testing.assert_array_equal(outputs.ended, [i < counts for i in range(ROOM)] + [False])
    assert texts(outputs) == [row[:n].tolist() for row, n in zip(block, expected, strict=True)]
    np.testing.assert_array_equal(outputs.scores, -np.asarray(expected, np.float32))


def test_end_of_sequence_against_limit_whichever_comes_first():
    pairs = list(itertools.product(range(ROOM), range(1, ROOM + 1)))
    block = np.full((len(pairs), ROOM), 7)
    for row, (eos_at, _) in enumerate(pairs):
        block[row, eos_at] = EOS
    outputs, taken = append(
        empty(len(pairs), max_decode_steps=[limit for _, limit in pairs]), block
    )
    expected = [min(eos_at + 1, limit) for eos_at, limit in pairs]
    np.testing.assert_array_equal(taken, expected)
    # Both at once in 4 of the rows.
    assert np.all(outputs.ended)
    assert texts(outputs) == [row[:n].tolist() for row, n in zip(block, expected, strict=True)]


def test_ended_rows_take_nothing_and_end_in_padding():
    log_probs = [[-1.0, -1.0, -np.inf, np.nan], [-1.0] * 4, [-1.0] * 4]
    blocks = [[5, EOS, 6, 6], [5, 6, 7, 8], [5, 5, 5, 5]]
    first, _ = append(empty(3, max_decode_len=5), blocks, log_probs=log_probs)
    # Log-probabilities of refused tokens do not reach the score.
    np.testing.assert_array_equal(first.scores, [-2, -4, -4])
    second, taken = append(first, [[9, 9, 9, 9]] * 3, counts=[4, 4, 0])
    np.testing.assert_array_equal(taken, [0, 1, 0])
    np.testing.assert_array_equal(second.ended, [True, True, False])
    third, taken = append(second, [[8, EOS, 8, 8]] * 3, counts=[4, 4, 0])
    np.testing.assert_array_equal(taken, [0, 0, 0])
    ended = [[0, 5, EOS, 0, 0, 0, 0, 0, 0, 0], [0, 5, 6, 7, 8, 9, 0, 0, 0, 0]]
    np.testing.assert_array_equal(third.sequences[:2], ended)
    np.testing.assert_array_equal(third.scores, second.scores)
    assert texts(third)[2] == [5, 5, 5, 5]


def test_a_score_does_not_depend_on_how_many_tokens_come_together():
    """Decodes are sorted by it: a last bit that depended on gamma would exchange equal ones."""
    log_probs = np.random.default_rng(0).normal(size=(8, 2 * ROOM)).astype(np.float32)

    def score(size):
        outputs = empty(8)
        for i in range(0, 2 * ROOM, size):
            some = log_probs[:, i : i + size]
            outputs, _ = append(outputs, np.full(some.shape, 5), log_probs=some)
        return outputs.scores

    np.testing.assert_array_equal(score(ROOM), score(1))


# start


def test_prompts_are_held_and_counted():
    # An end of sequence in a prompt ends nothing.
    prompts = jnp.array([[0, 5, 6, EOS], [0, 5, 0, 0], [0, 0, 0, 0], [0, 5, 6, 0]])
    outputs = START(prompts, 6, jnp.array([1, 2, 9, 0]), ROOM)
    np.testing.assert_array_equal(outputs.lengths, [3, 1, 0, 2])
    # Steps count from the prompt's end.
    np.testing.assert_array_equal(outputs.limits, [4, 3, 6, 2])
    # The largest number limits nothing.
    largest = jnp.array([1, 2, 2**31 - 1, 2**31 - 1])
    np.testing.assert_array_equal(START(prompts, 6, largest, ROOM).limits, [4, 3, 6, 6])
    np.testing.assert_array_equal(outputs.ended, [False, False, False, True])
    assert texts(outputs) == [[5, 6, EOS], [5], [], [5, 6]]
    # So does a prompt that fills the output.
    np.testing.assert_array_equal(START(prompts, 3, None, ROOM).ended, [True, False, False, False])
    arguments.check_prompts(prompts, 3)


# finish


def finished(scores, num_decodes, stats=None):
    """Finishes rows, each of which has its own token."""
    rows = len(scores)
    outputs, _ = append(empty(rows, 3), [[5 + row, EOS, 0, 0] for row in range(rows)], [2] * rows)
    outputs = outputs.replace(scores=jnp.asarray(scores, jnp.float32))
    return FINISH(outputs, num_decodes, 3, stats)


def test_decodes_come_by_increasing_score_within_their_input():
    scores = [-1.0, -3.0, -2.0, -5.0, -4.0, -6.0]
    stats = {"calls": jnp.arange(6), "positions": jnp.arange(12).reshape(6, 2)}
    decoded = finished(scores, 3, stats)
    np.testing.assert_array_equal(decoded.scores, [[-3, -2, -1], [-6, -5, -4]])
    np.testing.assert_array_equal(decoded.tokens[..., 0], [[6, 7, 5], [10, 8, 9]])
    np.testing.assert_array_equal(decoded.stats["calls"], [[1, 2, 0], [5, 3, 4]])
    np.testing.assert_array_equal(decoded.stats["positions"][0], [[2, 3], [4, 5], [0, 1]])


def test_a_decode_without_a_score_is_never_the_best_and_equals_keep_their_order():
    decoded = finished([-1.0, np.nan, -2.0, -1.0], 4)
    np.testing.assert_array_equal(decoded.scores, [[np.nan, -2, -1, -1]])
    # The start token and the room are cut off.
    expected = [[token, EOS, 0] for token in (6, 7, 5, 8)]
    np.testing.assert_array_equal(decoded.tokens, [expected])
    np.testing.assert_array_equal(decoded.lengths, [[2] * 4])


# keys


def test_one_key_gives_every_row_and_decode_its_own_in_batches_of_any_size():
    keys = ROW_KEYS(jax.random.key(0), 5, 3)
    assert keys.shape == (15,)
    assert len(set(bits(keys))) == 15
    assert bits(ROW_KEYS(jax.random.key(0), 2, 3)) == bits(keys)[:6]


def test_a_callers_key_gives_the_same_row_keys_at_any_place():
    """Keys have the order of repeated rows."""
    callers = jax.random.split(jax.random.key(1), 4)
    order = jnp.array([2, 0, 3])
    keys = ROW_KEYS(callers, 4, 2).reshape(4, 2)
    moved = ROW_KEYS(callers[order], 3, 2).reshape(3, 2)
    assert bits(moved) == bits(keys[order])
    assert len(set(bits(keys))) == 8
    np.testing.assert_array_equal(
        outputs_lib.repeat_rows({"row": jnp.arange(3)}, 2)["row"], [0, 0, 1, 1, 2, 2]
    )


# scores


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def scored(settings, tokens, rescale, logits=None):
    logits = jnp.asarray(LOGITS if logits is None else logits, jnp.float32)
    probs = standardize(logits, settings)
    return outputs_lib.token_log_probs(logits, probs, jnp.asarray(tokens), settings, rescale)


LOGITS = np.random.default_rng(0).normal(size=(2, 3, 5)) * 2
TOKENS = np.array([[0, 3, 4], [2, 2, 1]])
ROWS = np.arange(2)[:, None], np.arange(3)[None, :], TOKENS
GREEDY = np.argmax(LOGITS, axis=-1)


def test_rescaled_scores_are_of_what_each_row_is_sampled_from():
    """At temperature 0 an argmax token scores 0."""
    tokens = np.stack([GREEDY[0], TOKENS[1]])
    scores = scored(sampling([0.0, 2.0]), tokens, True)
    expected = np.take_along_axis(log_softmax(LOGITS[1] / 2), TOKENS[1][:, None], 1)[:, 0]
    np.testing.assert_allclose(scores, [[0, 0, 0], expected], atol=1e-5)
    # Others are the model's own.
    plain = scored(sampling([0.0, 2.0]), TOKENS, False)
    np.testing.assert_allclose(plain, log_softmax(LOGITS)[ROWS], atol=1e-5)
    np.testing.assert_array_equal(scored(sampling(0.0), GREEDY, True), np.zeros((2, 3)))


def test_rescaled_scores_see_what_top_k_keeps():
    second = np.argsort(LOGITS, axis=-1)[..., -2]
    smallest = np.take_along_axis(LOGITS, second[..., None], -1)
    kept = np.where(smallest <= LOGITS, LOGITS, -np.inf)
    scores = scored(sampling(1.0, top_k=2), second, True)
    expected = np.take_along_axis(log_softmax(kept), second[..., None], -1)[..., 0]
    np.testing.assert_allclose(scores, expected, atol=1e-5)


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("settings", [sampling(0.0), sampling(1.0, top_p=0.5)])
@pytest.mark.parametrize(("value", "where"), [(np.nan, np.s_[3:4]), (np.inf, np.s_[:])])
def test_logits_that_are_not_finite_have_no_finite_score(settings, rescale, value, where):
    logits = LOGITS.copy()
    logits[1, 2, where] = value
    # The argmax, beside one logit that is not finite.
    scores = np.array(scored(settings, GREEDY, rescale, logits))
    assert not np.isfinite(scores[1, 2])
    scores[1, 2] = 0
    assert np.isfinite(scores).all()


def test_a_token_that_lenience_lets_pass_scores_as_it_does_without_sampled_rows():
    """At temperature 0 the token is not the argmax, and has no probability."""
    alone = scored(sampling(0.0), TOKENS, True)
    beside = scored(sampling([0.0, 1.0]), TOKENS, True)
    assert np.any(TOKENS[0] != GREEDY[0])
    np.testing.assert_array_equal(beside[0], alone[0])
