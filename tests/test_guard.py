"""What the guard allows, by hand and under any draft."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.guard import guard

pytestmark = pytest.mark.usefixtures("quick_compilation")

GAMMA = 4
# An iteration costs 4 * 0.1 + 1.38 = 1.78.
COSTS = {"c": 0.1, "verification": 1.38, "start": 2.0}


def balance(guard):
    return pytest.approx(float(guard.balance), abs=1e-4)


def speculate(guard, tokens):
    return guard.add(jnp.float32(tokens), guard.cost(GAMMA, GAMMA, GAMMA + 1))


def test_a_balance_by_hand():
    """Two refusals are covered by the start, a third is not; 45 plain steps earn it.

    An iteration that brings one token loses .78 of the 2 to start with; two of them leave
    .44. What the first 40 tokens earn pays the start back, so 38 more earn nothing; from
    then on it is .05 a token, and after 7 of them the next .78 are there.
    """
    now = guard(**COSTS)
    assert now.allows(GAMMA)
    now = speculate(now, 1)
    assert balance(now) == 1.22
    now = speculate(now, 1)
    assert balance(now) == 0.44
    assert not now.allows(GAMMA)
    for _ in range(38):
        now = now.add(jnp.float32(1), 1.0)
    assert balance(now) == 0.44
    steps = 0
    while not now.allows(GAMMA):
        now, steps = now.add(jnp.float32(1), 1.0), steps + 1
    assert steps == 7
    # All four accepted, and a token more.
    assert balance(speculate(now, 5)) == 0.79 + 5 - 1.78 + 0.25


def test_gains_are_remembered_up_to_the_limit():
    now = guard(**COSTS, limit=5.0)
    for _ in range(10):
        now = speculate(now, 5)
    assert balance(now) == 5
    refused = 0
    while now.allows(GAMMA):
        now, refused = speculate(now, 1), refused + 1
    assert refused == 6


def test_where_full_acceptance_loses_nothing_is_ever_drafted():
    """c = 1, a draft as large as its target: 5 tokens at most for 5.4 steps."""
    now = guard(c=1.0, verification=1.4, start=100.0, limit=100.0)
    assert not now.allows(GAMMA)
    assert guard(c=0.8, verification=1.4, start=100.0, limit=100.0).allows(GAMMA)
    # Without drafts there is nothing to gain.
    assert not guard(c=0.0, verification=1.0).allows(0)


def test_a_proposal_costs_what_was_made_of_it():
    now = guard(c=0.1, verification=1.4)
    assert float(now.cost(GAMMA, GAMMA, GAMMA + 1)) == pytest.approx(1.8)
    assert float(now.cost(GAMMA, 2, 4)) == pytest.approx(0.2 + 1 + 0.4 * 3 / 4)
    assert float(now.cost(GAMMA, 0, 1)) == pytest.approx(1)


def test_what_comes_before_an_iteration_must_be_covered_too():
    now = guard(**COSTS, prefill=1.0)
    assert now.allows(GAMMA, before=1.0)
    assert not now.allows(GAMMA, before=1.3)
    assert balance(now.pay(jnp.float32(1.0))) == 1


@pytest.mark.parametrize("c", [0.02, 0.3, 0.6])
@pytest.mark.parametrize("tolerance", [0.0, 0.05])
def test_no_draft_costs_more_than_the_bound(c, tolerance):
    """Adversarial drafts too: all is accepted until the balance is full, then nothing is."""
    rng = np.random.default_rng(0)
    for good in (0, 30, None):
        now = guard(c=c, verification=1.4, prefill=0.5, tolerance=tolerance, start=2.0)
        time = tokens = 0.0
        ready = False
        while tokens < 300:
            before = 0.0 if ready else 0.5
            if now.allows(GAMMA, before):
                now, time, ready = now.pay(jnp.float32(before)), time + before, True
                accepted = rng.integers(GAMMA + 1) if good is None else GAMMA * (tokens < good)
                now = speculate(now, 1 + accepted)
                time, tokens = time + GAMMA * c + 1.4, tokens + 1 + accepted
            else:
                now, time, tokens = now.add(jnp.float32(1), 1.0), time + 1, tokens + 1
            assert float(now.balance) >= -1e-4
            assert time <= tokens + max(2.0, tolerance * tokens) + 1e-3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"c": -0.1}, "c is -0.1: give a finite number from 0"),
        ({"verification": float("nan")}, "verification is nan"),
        ({"tolerance": float("inf")}, "tolerance is inf"),
        ({"limit": 1.0}, "limit is 1.0 and start 2.0"),
    ],
)
def test_costs_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        guard(**COSTS | wrong)
