"""Tests of the keys that random numbers depend on, and of T5X's chain of keys."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config

from spec_t5x.errors import InputError
from spec_t5x.sampling.distributions import gumbel_argmax, sample, sample_residual, sampling
from spec_t5x.sampling.draws import (
    Draws,
    RowStream,
    draft_draws,
    purpose_keys,
    sample_coupled,
    sample_next,
    t5x_stream,
)
from tests.loops.stubs import bits

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB = 7
KEYS = jax.random.split(jax.random.key(2), 2)
SAMPLED = sampling(1.0)


def random_probs(rows, seed=0, vocab=VOCAB):
    probs = np.random.default_rng(seed).dirichlet(np.ones(vocab), size=rows)
    return jnp.asarray(probs, jnp.float32)


# RowStream


ROWS, POSITIONS = jnp.array([0, 0, 1, 1, 0]), jnp.array([3, 4, 3, 4, 3])


def test_keys_and_noise_depend_on_the_rows_key_and_position_alone():
    stream = RowStream(KEYS[ROWS])
    for drawn in stream.at(POSITIONS, 3):
        assert len(set(bits(drawn))) == 4
        assert bits(drawn)[0] == bits(drawn)[4]
    noise = np.asarray(stream.gumbels(POSITIONS, VOCAB))
    assert len(np.unique(noise[:4])) == 4 * VOCAB
    np.testing.assert_array_equal(noise[4], noise[0])
    alone = RowStream(KEYS[1:]).gumbels(POSITIONS[3:4], VOCAB)
    np.testing.assert_array_equal(alone[0], noise[3])


@pytest.mark.parametrize("partitionable", [True, False])
def test_the_first_key_is_the_same_however_many_are_asked_for(partitionable):
    # Gamma 0 therefore equals plain decoding, seed for seed.
    stream = RowStream(jax.random.split(jax.random.key(2), 3))
    lengths = jnp.array([0, 5, 2])
    with jax.threefry_partitionable(partitionable):
        (alone,) = stream.at(lengths, 1)
        assert bits(alone) == bits(stream.at(lengths, 3)[0])
        assert bits(alone) == bits(purpose_keys(stream, lengths)[0])


def test_noise_shares_no_key_with_the_other_draws():
    stream, positions = RowStream(KEYS), jnp.array([0, 1])
    noise = np.asarray(stream.gumbels(positions, VOCAB))
    others = [*stream.at(positions, 3), *[jax.vmap(jax.random.fold_in)(KEYS, positions)]]
    for keys in others:
        drawn = jax.vmap(lambda key: jax.random.gumbel(key, (VOCAB,)))(keys)
        assert not np.intersect1d(noise, drawn).size


# Draws


def draw(draws, probs, offset=0, settings=SAMPLED):
    """Draws tokens from ``probs`` and returns the one after ``offset`` others."""
    for _ in range(offset):
        _, draws = draws.next(probs, settings)
    return draws.next(probs, settings)[0]


def test_a_proposal_depends_on_the_rows_key_and_place_alone():
    probs = random_probs(64)
    keys = jax.random.split(jax.random.key(3), 64)
    lengths = jnp.asarray(np.random.default_rng(1).integers(9, size=64))
    order = np.random.default_rng(2).permutation(64)
    for coupled in (False, True):
        tokens = draw(draft_draws(RowStream(keys), lengths, coupled), probs, 2)
        moved = draft_draws(RowStream(keys[order]), lengths[order], coupled)
        np.testing.assert_array_equal(draw(moved, probs[order], 2), tokens[order])
        other = draw(draft_draws(RowStream(keys), lengths, coupled), probs, 3)
        assert np.any(other != tokens)


@pytest.mark.parametrize("coupled", [False, True])
def test_a_loop_that_carries_the_draws_on_draws_what_the_steps_do(coupled):
    probs = random_probs(2)
    draws = start = draft_draws(RowStream(KEYS), jnp.array([4, 9]), coupled)
    one_by_one = []
    for _ in range(5):
        token, draws = draws.next(probs, SAMPLED)
        one_by_one.append(token)

    def draw_next(offset, carry):
        draws, tokens = carry
        token, draws = draws.next(probs, SAMPLED)
        return draws, tokens.at[offset].set(token)

    nothing = jnp.zeros((5, 2), jnp.int32)
    after, tokens = jax.lax.fori_loop(0, 5, draw_next, (start, nothing))
    np.testing.assert_array_equal(tokens, one_by_one)
    assert draws.drawn == int(after.drawn) == 5
    # The same draws give the same token again.
    np.testing.assert_array_equal(start.next(probs, SAMPLED)[0], one_by_one[0])


def test_nodes_of_a_tree_have_draws_of_their_own():
    rows = 64
    draws = draft_draws(RowStream(jax.random.split(KEYS[0], rows)), jnp.zeros(rows, int), False)
    probs = jnp.full((rows, 2, VOCAB), 1 / VOCAB)
    both, after = draws.next_distinct(probs, jnp.log(probs), 3, SAMPLED)
    first, between = draws.next_distinct(probs[:, :1], jnp.log(probs[:, :1]), 3, SAMPLED)
    second, _ = between.next_distinct(probs[:, 1:], jnp.log(probs[:, 1:]), 3, SAMPLED)
    np.testing.assert_array_equal(both, np.concatenate([first, second], axis=1))
    assert np.any(first != second) and after.drawn == 2
    assert all(len(set(node)) == 3 for row in both.tolist() for node in row)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_other_types_than_float32_are_refused_while_tracing(unchecked, dtype):
    probs = random_probs(2).astype(dtype)
    draws = draft_draws(RowStream(KEYS), jnp.array([4, 9]), False)
    for draw_from in (
        lambda probs: draws.next(probs, SAMPLED),
        lambda probs: draws.next_distinct(probs[:, None], probs[:, None], 2, SAMPLED),
        lambda probs: sample(KEYS[0], probs[0]),
        lambda probs: sample_residual(KEYS[0], jnp.ones(VOCAB), probs[0]),
        lambda probs: gumbel_argmax(probs, jnp.zeros((2, VOCAB))),
    ):
        with pytest.raises(InputError, match=f"are {probs.dtype}: compute them in float32"):
            jax.eval_shape(draw_from, probs)


def test_drafts_of_two_iterations_at_one_place_are_drawn_anew():
    # A token proposed for position 5 and refused is proposed again, after position 4.
    stream = RowStream(jax.random.split(jax.random.key(3), 64))
    probs = jnp.full((64, VOCAB), 1 / VOCAB)
    for coupled in (False, True):
        first, second = (
            draw(draft_draws(stream, jnp.full(64, length), coupled), probs, 5 - length)
            for length in (3, 4)
        )
        assert np.any(first != second) != coupled


def test_coupled_draws_are_the_choices_of_the_noise_at_their_place():
    stream, lengths, probs = RowStream(KEYS), jnp.array([4, 9]), random_probs(2)
    for offset in range(3):
        tokens, places = draw(Draws(stream, lengths, coupled=True), probs, offset), lengths + offset
        noise = np.asarray(stream.gumbels(places, VOCAB))
        np.testing.assert_array_equal(tokens, np.argmax(np.log(probs) + noise, axis=-1))
        for found in (
            sample_coupled(stream, places, probs, SAMPLED),
            sample_next(stream, places, probs, SAMPLED, coupled=True),
        ):
            np.testing.assert_array_equal(tokens, found)


# T5X's chain, whose texts ``test_coupled.py`` compares with T5X's loop


STEPS, BATCH = 6, 4


@pytest.mark.parametrize(("partitionable", "high"), [(True, False), (False, False), (True, True)])
def test_a_row_of_t5x_stream_has_its_part_of_the_batchs_noise(partitionable, high):
    """With this seed one of the uniform numbers is 0, whose noise must be finite."""
    batch, vocab = 4, 20_011
    with jax.threefry_partitionable(partitionable), config.use_high_dynamic_range_gumbel(high):
        stream = t5x_stream(jax.random.key(27), jnp.arange(batch), STEPS)
        noise = jax.jit(lambda positions: stream.gumbels(positions, vocab))
        steps = np.arange(batch) * 2 % STEPS
        of_batch = jax.jit(functools.partial(jax.random.gumbel, shape=(batch, vocab)))
        expected = [of_batch(stream.steps[step])[row] for row, step in enumerate(steps)]
        np.testing.assert_array_equal(noise(jnp.arange(batch) + steps), np.stack(expected))


def test_a_program_for_batches_of_any_size_draws_the_same_noise():
    """T5X exports such programs."""

    def noise(starts):
        return t5x_stream(jax.random.key(3), starts, STEPS).gumbels(starts + 2, VOCAB)

    (batch,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(noise))(jax.ShapeDtypeStruct((batch,), jnp.int32))
    starts = jnp.arange(BATCH)
    np.testing.assert_array_equal(exported.call(starts), jax.jit(noise)(starts))


@pytest.mark.parametrize("partitionable", [True, False])
def test_t5x_stream_draws_no_rows_noise_twice(partitionable):
    batch, vocab = 8, 100
    stream = t5x_stream(jax.random.key(3), jnp.zeros(batch, jnp.int32), STEPS)
    with jax.threefry_partitionable(partitionable):
        traced = jax.make_jaxpr(lambda positions: stream.gumbels(positions, vocab))(stream.starts)
    # Where the noise of a row cannot be told apart, a loop draws the batch's for each.
    assert ("scan" in str(traced)) != partitionable
    largest = max(v.aval.size for e in traced.eqns for v in e.outvars)
    assert largest == batch * vocab


@pytest.mark.parametrize("same_for_rows", [False, True])
def test_rows_of_t5x_stream_may_be_at_different_steps(same_for_rows):
    stream = t5x_stream(jax.random.key(11), jnp.array([0, 2, 0, 1]), STEPS, same_for_rows)
    aligned = [stream.gumbels(jnp.array([0, 2, 0, 1]) + step, VOCAB) for step in range(STEPS)]
    steps = np.array([3, 0, 5, 1])
    apart = stream.gumbels(jnp.array([3, 2, 5, 2]), VOCAB)
    for row, step in enumerate(steps):
        np.testing.assert_array_equal(apart[row], aligned[step][row])
    # Noise covers the batch, or all rows get the same.
    assert len(np.unique(aligned[0])) == (VOCAB if same_for_rows else BATCH * VOCAB)
