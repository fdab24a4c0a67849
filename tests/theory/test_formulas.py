"""The closed forms, against the numbers that the paper prints, and by enumeration."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_t5x.errors import InputError
from spec_t5x.sampling.verification import rejection_acceptance
from spec_t5x.theory import formulas
from spec_t5x.theory.formulas import (
    beta,
    d_lk,
    expected_tokens,
    expected_tokens_by_position,
    guaranteed_improvement,
    optimal_gamma,
    oracle_improvement,
    wall_time_improvement,
)

few = settings(max_examples=40, deadline=None, derandomize=True)
rates = st.floats(0, 1)
costs = st.floats(0, 2)


@st.composite
def distributions(draw, num: int = 2):
    """``num`` distributions over the same few tokens, zeros among them."""
    vocab = draw(st.integers(1, 6))
    masses = st.lists(st.integers(0, 20), min_size=vocab, max_size=vocab).filter(any)
    return [np.array(m) / sum(m) for m in (draw(masses) for _ in range(num))]


# --- acceptance ------------------------------------------------------------------


@few
@given(distributions())
def test_d_lk_is_a_symmetric_divergence_in_both_forms(pair):
    p, q = pair
    middle = (p + q) / 2
    distance = d_lk(p, q)
    assert distance == pytest.approx(np.abs(q - middle).sum(), abs=1e-12)
    assert distance == pytest.approx(1 - np.minimum(p, q).sum(), abs=1e-12)
    assert distance == pytest.approx(d_lk(q, p), abs=1e-12)
    assert -1e-12 <= distance <= 1 + 1e-12
    assert (distance < 1e-12) == np.allclose(p, q, atol=1e-12)
    assert (distance > 1 - 1e-12) == (not np.any((p > 0) & (q > 0)))


@few
@given(distributions(), st.sampled_from([1.0, 0.5, 0.3, 0.1]))
def test_beta_is_how_often_algorithm_1_accepts(pair, lenience):
    p, q = pair
    # For every draft x, the share of uniform numbers r with r l q(x) <= p(x).
    accepted = sum(
        q_x * min(1.0, p_x / (lenience * q_x)) for p_x, q_x in zip(p, q, strict=True) if q_x
    )
    assert beta(p, q, lenience) == pytest.approx(accepted, abs=1e-12)
    if lenience == 1:
        assert beta(p, q) == pytest.approx(1 - d_lk(p, q), abs=1e-12)


@few
@given(distributions())
def test_rejection_sampling_accepts_at_most_as_often(pair):
    p, q = pair
    # Section A.2: r < p / (M q), M = max p / q over what the draft or target may emit.
    possible = p > 0
    largest = max((p[possible] / q[possible]).tolist()) if q[possible].all() else np.inf
    accepted = formulas.beta_of_rejection_sampling(p, q)
    assert accepted == pytest.approx(1 / largest, abs=1e-12)
    assert accepted <= beta(p, q) + 1e-12


def test_the_verifier_of_section_a2_accepts_as_often():
    p, q = np.random.default_rng(2).dirichlet(np.ones(5), (2, 6)).astype(np.float32)
    expected = rejection_acceptance(jnp.array(p), jnp.array(q))
    np.testing.assert_allclose(formulas.beta_of_rejection_sampling(p, q), expected, rtol=1e-5)


def test_lenience_at_argmax_accepts_what_is_nearly_as_likely():
    p = np.array([0.5, 0.3, 0.2])
    drafts = np.eye(3)
    for lenience, expected in ((1.0, [1, 0, 0]), (0.6, [1, 1, 0]), (0.4, [1, 1, 1])):
        rows = np.tile(p, (3, 1))
        assert formulas.beta_of_lenient_argmax(rows, drafts, lenience).tolist() == expected
    # Where the draft is not certain, it is the chance of drawing such a token.
    assert formulas.beta_of_lenient_argmax(p, np.array([0.1, 0.6, 0.3]), 0.6) == pytest.approx(0.7)


# --- tokens per iteration ----------------------------------------------------------


def test_expected_tokens_are_the_geometric_sum():
    for alpha in np.linspace(0.0, 1.0, 23):
        for gamma in range(12):
            total = sum(alpha**i for i in range(gamma + 1))
            assert expected_tokens(alpha, gamma) == pytest.approx(total, rel=1e-12)


def test_no_digits_are_lost_near_certainty():
    alpha = 1 - 1e-13
    assert expected_tokens(alpha, 9) == pytest.approx(10 - 45e-13, rel=1e-15)


@few
@given(rates, st.integers(0, 12))
def test_equal_rates_at_all_places_are_equation_1(alpha, gamma):
    betas = np.full(gamma, alpha)
    expected = expected_tokens(alpha, gamma)
    assert expected_tokens_by_position(betas) == pytest.approx(expected, rel=1e-12)
    pmf = formulas.length_pmf(alpha, gamma)
    assert pmf.sum() == pytest.approx(1, abs=1e-12)
    assert pmf @ np.arange(1, gamma + 2) == pytest.approx(expected, rel=1e-12)


@few
@given(st.lists(rates, max_size=5))
def test_rates_that_differ_are_summed_over_all_courses(betas):
    """By enumeration of which drafts are accepted, whether or not they are reached."""
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
    # Independent betas of the same mean would promise another length.
    assert expected_tokens(14 / 24, 4) != pytest.approx(2.4, abs=0.05)
    # Two texts ended with their first draft, and two with their second: no refusals.
    assert formulas.conditional_acceptance(accepted, np.array([10, 6, 4, 0]))[1] == 1.0


# --- time, operations, memory --------------------------------------------------------


@pytest.mark.parametrize("c", [0.0, 0.3, 5.0])
def test_gamma_0_is_plain_decoding(c):
    assert wall_time_improvement(0.8, 0, c) == 1
    assert formulas.operations_factor(0.8, 0, c) == 1
    assert formulas.memory_factor(0.8, 0, c) == 1


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
    """gamma 1, alpha 1/2: two tokens take one iteration or two, equally often.

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


def test_operations_and_memory_go_opposite_ways():
    # One iteration: 4 drafts at 0.1 and 5 target tokens for 3.3616 tokens on average.
    tokens = expected_tokens(0.8, 4)
    assert formulas.operations_factor(0.8, 4, 0.1) == pytest.approx((4 * 0.1 + 5) / tokens)
    # Section 3.4: reads shrink by Equation 1.
    assert 1 / formulas.memory_factor(0.8, 4) == pytest.approx(tokens)
    assert formulas.memory_factor(0.8, 4, c_bytes=0.1) == pytest.approx(1.4 / tokens)


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


def test_gamma_depends_on_what_verification_really_costs():
    flat = optimal_gamma(0.8, 0.05)
    # As measured on a CPU: every row has its price. And in steps, as tiles have it.
    assert 0 < optimal_gamma(0.8, 0.05, lambda m: 0.8 + 0.2 * m) < flat
    assert optimal_gamma(0.8, 0.001, lambda m: np.where(m <= 8, 1.0, 2.0)) == 7


# --- arrays ----------------------------------------------------------------------------


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
    ("alpha", "gamma", "expected"),
    [
        (-0.1, 3, "alpha is -0.1"),
        (np.array([0.5, 1.5]), 3, "alpha is 1.5"),
        (0.5, 2.5, "gamma is 2.5"),
        (0.5, np.array([1, -4]), "gamma is -4"),
    ],
)
def test_what_is_no_rate_or_number_of_drafts_is_refused(alpha, gamma, expected):
    for call in (
        lambda: expected_tokens(alpha, gamma),
        lambda: wall_time_improvement(alpha, gamma, 0.1),
        lambda: formulas.operations_factor(alpha, gamma, 0.1),
    ):
        with pytest.raises(InputError, match=expected):
            call()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: wall_time_improvement(0.5, 3, -0.1), "c is -0.1"),
        (lambda: wall_time_improvement(0.5, 3, 0.1, -1.0), "verification_cost is -1.0"),
        (lambda: guaranteed_improvement(1.5, 0.1), "alpha is 1.5"),
        (lambda: formulas.operations_factor(0.5, 3, -0.2), "c_hat is -0.2"),
        (lambda: optimal_gamma(0.5, 0.1, max_gamma=-1), "max_gamma is -1"),
        (lambda: expected_tokens_by_position(np.array([0.5, 1.2])), "betas hold 1.2"),
        (lambda: beta(np.ones(1), np.ones(1), 0.0), "lenience is 0.0"),
    ],
)
def test_what_is_no_cost_or_rate_is_refused(call, expected):
    with pytest.raises(InputError, match=expected):
        call()
