"""The closed forms, against the numbers that the paper prints."""

import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.theory import expected_tokens, oracle_improvement, wall_time_improvement

# Table 1: alpha, gamma and the speed-up where drafts cost nothing.
TABLE_1 = [
    (0.6, 2, 1.96),
    (0.7, 3, 2.53),
    (0.8, 2, 2.44),
    (0.8, 5, 3.69),
    (0.9, 2, 2.71),
    (0.9, 10, 6.86),
]

# Table 2: gamma, alpha, c and the expected improvement.
TABLE_2 = [
    (7, 0.75, 0.02, 3.2),
    (7, 0.80, 0.04, 3.3),
    (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3),
    (5, 0.65, 0.02, 2.4),
    (5, 0.73, 0.04, 2.6),
    (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9),
    (3, 0.55, 0.04, 1.8),
]
# These print a digit that the formula gives for unrounded values of alpha and c only:
# 2.347, 1.934 and 1.541 with the two decimals that are printed.
TABLE_2_UNROUNDED = [(5, 0.68, 0.04, 2.4), (3, 0.71, 0.11, 2.0), (3, 0.56, 0.11, 1.6)]


@pytest.mark.parametrize(("alpha", "gamma", "speed"), TABLE_1)
def test_table_1_to_the_printed_digits(alpha, gamma, speed):
    assert round(expected_tokens(alpha, gamma), 2) == speed
    assert wall_time_improvement(alpha, gamma, c=0.0) == expected_tokens(alpha, gamma)


@pytest.mark.parametrize(("gamma", "alpha", "c", "expected"), TABLE_2)
def test_table_2_to_the_printed_digits(gamma, alpha, c, expected):
    assert round(wall_time_improvement(alpha, gamma, c), 1) == expected


@pytest.mark.parametrize(("gamma", "alpha", "c", "expected"), TABLE_2_UNROUNDED)
def test_the_rest_of_table_2_is_within_the_rounding_of_alpha_and_c(gamma, alpha, c, expected):
    improvement = wall_time_improvement(alpha, gamma, c)
    assert round(improvement, 1) != expected
    assert improvement == pytest.approx(expected, abs=0.1)
    most = wall_time_improvement(alpha + 0.005, gamma, c - 0.005)
    assert improvement < expected <= round(most, 1)


def test_expected_tokens_are_the_geometric_sum():
    for alpha in np.linspace(0.0, 0.99, 23):
        for gamma in range(12):
            closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
            assert expected_tokens(alpha, gamma) == pytest.approx(closed, rel=1e-12)


def test_expected_tokens_are_those_of_a_simulation():
    """Each draft accepted with probability alpha, and one token of the target's own."""
    accepted = np.random.default_rng(0).random((200_000, 4)) < 0.7
    tokens = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
    # Five standard errors.
    error = 5 * tokens.std() / np.sqrt(len(tokens))
    assert expected_tokens(0.7, 4) == pytest.approx(tokens.mean(), abs=error)


@pytest.mark.parametrize("gamma", [0, 1, 7])
def test_a_draft_that_is_always_accepted_gives_gamma_plus_1_tokens(gamma):
    assert expected_tokens(1.0, gamma) == gamma + 1
    assert expected_tokens(0.0, gamma) == 1


@pytest.mark.parametrize("c", [0.0, 0.3, 5.0])
def test_gamma_0_is_plain_decoding(c):
    assert wall_time_improvement(0.8, 0, c) == 1


def test_gamma_1_gives_the_guaranteed_improvement():
    """Corollary 3.9: (1 + alpha) / (1 + c), more than 1 just where alpha > c."""
    assert wall_time_improvement(0.5, 1, 0.25) == pytest.approx(1.5 / 1.25)
    assert wall_time_improvement(0.3, 1, 0.3) == pytest.approx(1.0)


def test_a_dearer_verification_takes_its_share():
    assert wall_time_improvement(0.5, 3, 0.25, 1.0) == pytest.approx(1.875 / 1.75)
    assert wall_time_improvement(0.5, 3, 0.25, 1.5) == pytest.approx(1.875 / 2.25)


@pytest.mark.parametrize(
    ("alpha", "gamma", "expected"),
    [
        (-0.1, 3, "alpha is -0.1"),
        (1.0001, 3, "alpha is 1.0001"),
        (float("nan"), 3, "alpha is nan"),
        (0.5, -1, "gamma is -1"),
    ],
)
def test_what_is_no_rate_or_number_of_drafts_is_refused(alpha, gamma, expected):
    for call in (
        lambda: expected_tokens(alpha, gamma),
        lambda: wall_time_improvement(alpha, gamma, 0.1),
    ):
        with pytest.raises(InputError, match=expected):
            call()


def test_an_oracle_wastes_no_draft():
    # 1 / (1 - .8) = 5 tokens for one call and 4 drafts.
    assert oracle_improvement(0.8, 0.1) == pytest.approx(5 / (1 + 4 * 0.1))
    assert oracle_improvement(0.0, 0.3) == 1
    assert oracle_improvement(1.0, 0.0) == float("inf")


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("gamma", [1, 3, 9])
def test_no_gamma_beats_the_oracle(alpha, gamma):
    assert wall_time_improvement(alpha, gamma, 0.05) < oracle_improvement(alpha, 0.05)
