"""Tests of the closed forms, against the numbers that the paper prints, and by enumeration."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_t5x.errors import InputError
from spec_t5x.labs.theory import formulas
from spec_t5x.labs.theory.formulas import (
    beta,
    d_lk,
    expected_tokens,
    expected_tokens_by_position,
    guaranteed_improvement,
    optimal_gamma,
    oracle_improvement,
    wall_time_improvement,
)
from spec_t5x.sampling.verification import rejection_acceptance

few = settings(max_examples=40, derandomize=True)
rates = st.floats(0, 1)
costs = st.floats(0, 2)


@st.composite
def pairs(draw):
    """Draws two distributions over the same few tokens, zeros among them."""
    vocab = draw(st.integers(1, 6))
    masses = st.lists(st.integers(0, 20), min_size=vocab, max_size=vocab).filter(any)
    return [np.array(m) / sum(m) for m in (draw(masses), draw(masses))]


# --- acceptance ------------------------------------------------------------------


@few
@given(pairs())
def test_d_lk_is_a_symmetric_divergence_in_both_forms(pair):
    p, q = pair
    distance = d_lk(p, q)
    assert distance == pytest.approx(np.abs(q - (p + q) / 2).sum(), abs=1e-12)
    assert distance == pytest.approx(1 - np.minimum(p, q).sum(), abs=1e-12)
    assert distance == pytest.approx(d_lk(q, p), abs=1e-12)
    assert -1e-12 <= distance <= 1 + 1e-12
    assert (distance < 1e-12) == np.allclose(p, q, atol=1e-12)
    assert (distance > 1 - 1e-12) == (not np.any((p > 0) & (q > 0)))


@few
@given(pairs(), st.sampled_from([1.0, 0.5, 0.3, 0.1]))
def test_beta_is_how_often_algorithm_1_accepts(pair, lenience):
    p, q = pair
    # For every draft x, the share of uniform numbers r with r l q(x) <= p(x).
    accepted = sum(
        q_x * min(1.0, p_x / (lenience * q_x)) for p_x, q_x in zip(p, q, strict=True) if q_x
    )
    assert beta(p, q, lenience) == pytest.approx(accepted, abs=1e-12)


@few
@given(pairs())
def test_rejection_sampling_accepts_at_most_as_often(pair):
    p, q = pair
    # Section A.2: r < p / (M q), M = max p / q over what the draft or target may emit.
    possible = p > 0
    largest = max((p[possible] / q[possible]).tolist()) if q[possible].all() else np.inf
    accepted = formulas.beta_of_rejection_sampling(p, q)
    assert accepted == pytest.approx(1 / largest, abs=1e-12)
    assert accepted <= beta(p, q) + 1e-12
    of_verifier = rejection_acceptance(*(jnp.asarray(each, jnp.float32) for each in pair))
    assert accepted == pytest.approx(float(of_verifier), abs=1e-5)


def test_lenience_at_argmax_accepts_what_is_nearly_as_likely():
    p = np.array([0.5, 0.3, 0.2])
    for lenience, expected in ((1.0, [1, 0, 0]), (0.6, [1, 1, 0]), (0.4, [1, 1, 1])):
        rows = np.tile(p, (3, 1))
        assert formulas.beta_of_lenient_argmax(rows, np.eye(3), lenience).tolist() == expected
    # If the draft is not certain, it is the probability of drawing an acceptable token.
    assert formulas.beta_of_lenient_argmax(p, np.array([0.1, 0.6, 0.3]), 0.6) == pytest.approx(0.7)


# --- tokens per iteration ----------------------------------------------------------


def test_expected_tokens_are_the_geometric_sum():
    for alpha in np.linspace(0.0, 1.0, 23):
        for gamma in range(12):
            total = sum(alpha**i for i in range(gamma + 1))
            assert expected_tokens(alpha, gamma) == pytest.approx(total, rel=1e-12)
            equal_rates = expected_tokens_by_position(np.full(gamma, alpha))
            assert equal_rates == pytest.approx(total, rel=1e-12)
    # No digits are lost near certainty.
    assert expected_tokens(1 - 1e-13, 9) == pytest.approx(10 - 45e-13, rel=1e-15)


@few
@given(st.lists(rates, max_size=5))
def test_rates_that_differ_are_summed_over_all_courses(betas):
    """The courses are all choices of accepted drafts, reached or not."""
    expected = 0.0
    for accepted in itertools.product([True, False], repeat=len(betas)):
        probability = np.prod([b if a else 1 - b for a, b in zip(accepted, betas, strict=True)])
        leading = len(list(itertools.takewhile(bool, accepted)))
        expected += probability * (1 + leading)
    assert expected_tokens_by_position(np.array(betas)) == pytest.approx(expected, rel=1e-12)


def test_acceptance_is_conditional_on_verification():
    # 10 iterations, of which 8 kept their first draft, 6 their second, none a third.
    accepted = np.array([8, 6, 0, 0])
    betas = formulas.conditional_acceptance(accepted, np.array([10, 8, 6, 0]))
    assert betas == pytest.approx([0.8, 0.75, 0.0, 0.0])
    assert expected_tokens_by_position(betas) == pytest.approx(1 + (8 + 6) / 10)
    # Two texts ended with their first draft, and two with their second: no refusals.
    assert formulas.conditional_acceptance(accepted, np.array([10, 6, 4, 0]))[1] == 1.0


# --- time and operations ---------------------------------------------------------------


@pytest.mark.parametrize("c", [0.0, 0.3, 5.0])
def test_gamma_0_is_plain_decoding(c):
    assert wall_time_improvement(0.8, 0, c) == 1
    assert formulas.operations_factor(0.8, 0, c) == 1


@few
@given(rates, costs)
def test_some_gamma_keeps_corollary_3_9(alpha, c):
    guaranteed = guaranteed_improvement(alpha, c)
    assert formulas.best_improvement(alpha, c) >= guaranteed - 1e-12
    if abs(alpha - c) > 1e-9:
        assert (guaranteed > 1) == (alpha > c)
    if alpha > c:
        assert guaranteed == pytest.approx(wall_time_improvement(alpha, 1, c), rel=1e-12)
    else:
        assert guaranteed == 1
    if alpha < c - 1e-9:
        # No gamma gains: nothing is drafted.
        assert optimal_gamma(alpha, c) == 0


def test_iterations_of_two_tokens_by_hand():
    """At gamma 1 and alpha 1/2, two tokens take one iteration or two, equally often.

    The slower of two rows takes one only if both do.
    """
    assert formulas.expected_iterations(0.5, 1, 2, 1) == pytest.approx(1.5)
    assert formulas.expected_iterations(0.5, 1, 2, 2) == pytest.approx(1.75)
    assert formulas.expected_iterations(1.0, 3, 10, 8) == pytest.approx(3)
    assert formulas.expected_iterations(0.0, 3, 10, 8) == pytest.approx(10)


def test_iterations_are_those_of_simulated_rows():
    alpha, gamma, length, batch = 0.7, 4, 40, 8
    rng = np.random.default_rng(0)
    accepted = np.cumprod(rng.random((4000, batch, length, gamma)) < alpha, axis=-1).sum(axis=-1)
    written = np.cumsum(1 + accepted, axis=-1)
    iterations = 1 + np.sum(written < length, axis=-1).max(axis=-1)
    error = 4 * iterations.std() / np.sqrt(len(iterations))
    expected = formulas.expected_iterations(alpha, gamma, length, batch)
    assert abs(iterations.mean() - expected) < error


def test_operations_are_those_of_drafts_and_verified_tokens():
    # One iteration: 4 drafts at 0.1 and 5 target tokens for 3.3616 tokens on average.
    assert formulas.operations_factor(0.8, 4, 0.1) == pytest.approx((4 * 0.1 + 5) / 3.3616)


def test_an_oracle_wastes_no_draft():
    # 1 / (1 - .8) = 5 tokens for one call and 4 drafts.
    assert oracle_improvement(0.8, 0.0) == pytest.approx(5)
    assert oracle_improvement(0.8, 0.1) == pytest.approx(5 / (1 + 4 * 0.1))
    assert oracle_improvement(0.0, 0.3) == 1
    assert oracle_improvement(1.0, 0.0) == float("inf")


# --- the choice of gamma ---------------------------------------------------------------


@few
@given(rates, costs, st.sampled_from([0.0, 0.02, 0.3]))
def test_the_optimal_gamma_is_brute_forces(alpha, c, slope):
    def cost(m):
        return 1 + slope * (m - 1)

    factors = [1.0]
    for gamma in range(1, 21):
        tokens = sum(alpha**i for i in range(gamma + 1))
        factors.append(tokens / (gamma * c + cost(gamma + 1)))
    best = optimal_gamma(alpha, c, cost, max_gamma=20)
    assert factors[best] == pytest.approx(max(factors), rel=1e-12)
    assert formulas.best_improvement(alpha, c, cost, 20) == pytest.approx(max(factors))


def test_arrays_broadcast_and_numbers_stay_numbers():
    alphas, gammas = np.array([[0.5], [0.8]]), np.array([0, 2, 7])
    values = wall_time_improvement(alphas, gammas, 0.05)
    assert values.shape == (2, 3)
    assert values[1, 2] == wall_time_improvement(0.8, 7, 0.05)
    assert isinstance(wall_time_improvement(0.8, 7, 0.05), float)
    assert isinstance(optimal_gamma(0.8, 0.05), int)
    assert optimal_gamma(alphas, np.array([0.01, 0.1, 0.5])).shape == (2, 3)


def test_the_formulas_of_distributions_can_be_traced():
    p, q = np.random.default_rng(1).dirichlet(np.ones(4), (2, 3)).astype(np.float32)
    for function in (d_lk, beta, functools.partial(formulas.beta_of_lenient_argmax, lenience=0.4)):
        np.testing.assert_allclose(jax.jit(function)(p, q), function(p, q), rtol=1e-5)


# --- mistakes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (expected_tokens, (-0.1, 3), "alpha is -0.1"),
        (expected_tokens, (0.5, np.array([1, -4])), "gamma is -4"),
        (wall_time_improvement, (np.array([0.5, 1.5]), 3, 0.1), "alpha is 1.5"),
        (formulas.operations_factor, (0.5, 2.5, 0.1), "gamma is 2.5"),
        (wall_time_improvement, (0.5, 3, -0.1), "c is -0.1"),
        (wall_time_improvement, (0.5, 3, 0.1, -1.0), "verification_cost is -1.0"),
        (guaranteed_improvement, (1.5, 0.1), "alpha is 1.5"),
        (formulas.operations_factor, (0.5, 3, -0.2), "c_hat is -0.2"),
        (optimal_gamma, (0.5, 0.1, 1.0, -1), "max_gamma is -1"),
        (expected_tokens_by_position, (np.array([0.5, 1.2]),), "betas hold 1.2"),
        (beta, (np.ones(1), np.ones(1), 0.0), "lenience is 0.0"),
        (formulas.beta_of_lenient_argmax, (np.ones(1), np.ones(1), 1.5), "lenience is 1.5"),
    ],
)
def test_values_out_of_range_are_refused(function, arguments, message):
    with pytest.raises(InputError, match=message):
        function(*arguments)
