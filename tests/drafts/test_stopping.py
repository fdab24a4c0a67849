"""Adaptive gamma: the arithmetic of stopping, and what it does to decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts import stopping as lib
from spec_t5x.drafts.stopping import Stopping
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Outcome
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.sampling.distributions import sampling
from spec_t5x.testing.toy_models import StubTarget
from tests.loops.stubs import counts_upwards

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
USUAL = Stopping()


def history(*confidences):
    """One row that was just proposed these drafts."""
    state = lib.start(jnp.array([0]))
    for offset, confidence in enumerate(confidences):
        state = lib.observe(state, jnp.array([confidence]), jnp.int32(offset))
    return state.replace(proposed=jnp.array([len(confidences)]))


def after(state, num_accepted, stopping=USUAL):
    outcome = Outcome(lengths=jnp.array([num_accepted + 1]), num_accepted=jnp.array([num_accepted]))
    return lib.update(state, stopping, outcome)


def test_before_anything_was_seen_the_draft_is_believed():
    state = lib.start(jnp.array([0]))
    for confidence in (0.05, 0.5, 0.99):
        assert abs(float(lib.acceptance(state, jnp.array([confidence]))[0]) - confidence) < 0.07


def test_what_was_accepted_and_what_was_refused_is_counted_by_confidence():
    """Of 4 drafts 2 are accepted: 3 are verified, and the last says nothing."""
    before = history(0.9, 0.9, 0.3, 0.3)
    state = after(before, 2)
    new = state.verified - before.verified, state.accepted - before.accepted
    np.testing.assert_array_equal(new[0][0], [0, 0, 1, 0, 0, 0, 0, 2])
    np.testing.assert_array_equal(new[1][0], [0, 0, 0, 0, 0, 0, 0, 2])
    assert float(lib.acceptance(state, jnp.array([0.3]))[0]) < 0.25
    assert int(state.proposed[0]) == 0


def test_tokens_and_time_are_added_up():
    state = after(history(0.9, 0.9, 0.3), 2, Stopping(c=0.2, position=0.1))
    assert float(state.tokens[0]) == 1 + 3
    assert float(state.time[0]) == pytest.approx(1 + 1 + 3 * 0.3)


def test_what_was_counted_once_is_not_counted_again():
    once = after(history(0.9, 0.9), 1)
    twice = after(once, 0)
    np.testing.assert_array_equal(twice.verified, once.verified)


def test_one_more_is_worth_it_while_its_chance_outweighs_its_cost():
    state = lib.start(jnp.array([0]))
    # One of two drafts is taken as accepted, and a token takes one step so far.
    for reach, expected in ((0.5, True), (0.3, False)):
        worth = lib.worth_another(state, Stopping(c=0.1, position=0.1), jnp.array([reach]))
        assert bool(worth[0]) is expected


def test_a_position_costs_something_on_a_cpu_alone(monkeypatch):
    assert USUAL.cost == pytest.approx(0.2)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert USUAL.cost == pytest.approx(0.1)
    assert Stopping(c=0.2, position=0.05).cost == pytest.approx(0.25)


def test_what_others_wrote_says_nothing_of_the_drafts():
    """Rows that were not asked, in a mixed draft."""
    before = after(history(0.9, 0.9), 2)
    copied = lib.update(before, USUAL, Outcome(lengths=jnp.array([9]), num_accepted=jnp.array([0])))
    assert int(copied.lengths[0]) == 9
    for name in ("tokens", "time", "verified"):
        np.testing.assert_array_equal(getattr(copied, name), getattr(before, name))


@pytest.mark.parametrize("values", [{"c": -0.1}, {"position": float("nan")}])
def test_impossible_costs_are_refused(values):
    with pytest.raises(InputError, match="give a finite number from 0"):
        Stopping(**values)


def decode(step, stopping):
    return speculative_decode(
        StubTarget(counts_upwards(64), 64),
        TransformerDraft(StubTarget(counts_upwards(64, step), 64), stopping=stopping),
        jnp.zeros((1, 1), jnp.int32),
        jnp.array([[0, 3]]),
        KEY,
        sampling(0.0),
        gamma=6,
        max_decode_len=40,
    )


def test_a_draft_that_is_always_right_goes_on_to_the_bound():
    stats = decode(1, Stopping(c=0.05, position=0.02)).stats
    assert int(stats.proposed[0, 0]) == 6 * int(stats.target_calls[0, 0])


def test_a_draft_that_is_always_wrong_soon_proposes_one():
    """However sure of itself."""
    decoded = decode(2, Stopping(c=0.2))
    assert decoded.tokens[0, 0].tolist() == [*range(3, 43)]
    calls, proposed = int(decoded.stats.target_calls[0, 0]), int(decoded.stats.proposed[0, 0])
    assert calls == 39
    assert proposed <= calls + 12


def test_drafting_for_nothing_goes_on_to_the_bound():
    stats = decode(2, Stopping(c=0.0, position=0.0)).stats
    assert int(stats.proposed[0, 0]) == 6 * int(stats.target_calls[0, 0])
