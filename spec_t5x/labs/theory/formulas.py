"""Closed forms of the paper, and further ones that practice needs.

    alpha    acceptance rate: probability that a draft is accepted, on average
    beta     the same at one place, given the text before it (Definition 3.1)
    gamma    drafts per iteration
    c        time of a draft step over time of a target step (Definition 3.7)
    c_hat    arithmetic operations of a draft step over those of a target step
    T(m)     time of the target's call over m = gamma + 1 tokens, in target steps

Arguments are numbers or arrays, which broadcast against one another in numpy; the functions of
distributions compute in the library of their arrays, also inside ``jax.jit``. A value out of its
range is an ``InputError``. Betas are i.i.d. unless they are given by position.
"""

import functools
from collections.abc import Callable

import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.types import Array, Float, Integer

Number = int | float | np.generic | Array
# A number, or a function of m = gamma + 1.
VerificationCost = Number | Callable[[Array], Array]

# The largest gamma that is tried by default: more than any of Figure 3.
MAX_GAMMA = 128


# Acceptance of distributions


def d_lk(
    target_probs: Float[Array, "*rows vocab"], draft_probs: Float[Array, "*rows vocab"]
) -> Number:
    """Returns ``sum |p - M|``, ``M = (p + q) / 2`` (Definition 3.2): ``1 - beta`` (Lemma 3.3).

    The divergence is symmetric and in [0, 1]; 1 for disjoint distributions (Corollary 3.4).
    """
    middle = (target_probs + draft_probs) / 2
    return abs(target_probs - middle).sum(axis=-1)


def beta(
    target_probs: Float[Array, "*rows vocab"],
    draft_probs: Float[Array, "*rows vocab"],
    lenience: float = 1.0,
) -> Number:
    """Returns ``sum min(p / l, q)``, the probability that a draft is accepted (Theorem 3.5).

    Its mean over the places of texts that the target generated is alpha (Corollary 3.6). p and q,
    the arguments, are standardized; the lenience l is in (0, 1] (section A.5); 1 is Algorithm 1.
    """
    _check_lenience(lenience)
    xp = target_probs.__array_namespace__()
    return xp.minimum(target_probs / lenience, draft_probs).sum(axis=-1)


def beta_of_lenient_argmax(
    target_probs: Float[Array, "*rows vocab"],
    draft_probs: Float[Array, "*rows vocab"],
    lenience: float,
) -> Number:
    """Returns the probability that ``p(x) >= l max(p)`` for x drawn from q (section A.5, argmax).

    The paper prints the inequality reversed. ``target_probs`` are p at temperature 1,
    ``draft_probs`` q after standardization, and l is in (0, 1].
    """
    _check_lenience(lenience)
    xp = target_probs.__array_namespace__()
    acceptable = target_probs >= lenience * target_probs.max(axis=-1, keepdims=True)
    return xp.where(acceptable, draft_probs, 0.0).sum(axis=-1)


def beta_of_rejection_sampling(
    target_probs: Float[np.ndarray, "*rows vocab"], draft_probs: Float[np.ndarray, "*rows vocab"]
) -> Number:
    """Returns the least ``q(x) / p(x)`` where p(x) > 0, never above ``beta`` (section A.2)."""
    infinite = np.full_like(target_probs, np.inf)
    ratios = np.divide(draft_probs, target_probs, out=infinite, where=target_probs > 0)
    return ratios.min(axis=-1)


# Tokens per iteration


def expected_tokens(alpha: Number, gamma: Number) -> Number:
    """Returns the expected tokens per iteration, ``(1 - a^(g+1)) / (1 - a)`` (Equation 1)."""
    _check_rate("alpha is", alpha)
    _check_gamma(gamma)
    alpha, gamma = np.asarray(alpha, float), np.asarray(gamma, float)
    # (e^((g+1) log a) - 1) / (e^(log a) - 1) loses no digits near a = 1, where it is 0 / 0.
    inside = (alpha > 0) & (alpha < 1)
    log = np.log(np.where(inside, alpha, 0.5))
    geometric = np.expm1((gamma + 1) * log) / np.expm1(log)
    return np.where(inside, geometric, np.where(alpha == 0, 1.0, gamma + 1))[()]


def expected_tokens_by_position(betas: Float[Array, "*rows gamma"]) -> Number:
    """Returns the expected tokens per iteration, ``1 + b_1 + b_1 b_2 + … + b_1 … b_gamma``.

    b_i is the rate at which the i-th draft is accepted *if those before it were*
    (``conditional_acceptance``); the sum is exact, without an assumption of independence.
    """
    _check_rate("betas hold", betas)
    return 1 + np.cumprod(betas, axis=-1).sum(axis=-1)


def conditional_acceptance(
    accepted_by_position: Integer[Array, "gamma"], verified_by_position: Integer[Array, "gamma"]
) -> Float[np.ndarray, "gamma"]:
    """Returns the rate at which the i-th draft was accepted if those before it were.

    The arguments count the iterations whose i-th draft was accepted, and verified:
    ``DecodeStats.accepted_by_position`` and ``verified_by_position``, summed over rows. The rate
    is 0 where nothing was verified.
    """
    return np.asarray(accepted_by_position) / np.maximum(np.asarray(verified_by_position), 1)


@functools.lru_cache
def expected_iterations(alpha: float, gamma: int, length: int, rows: int) -> float:
    """Returns the expected iterations until the last of ``rows`` rows has ``length`` tokens.

    The number is exact if rows advance independently, each as in section 3.1.
    """
    _check_rate("alpha is", alpha)
    _check_gamma(gamma)
    # The probabilities of 1, 2, … gamma + 1 tokens in an iteration.
    reached = float(alpha) ** np.arange(gamma + 1)
    advance = np.append(0.0, reached * np.append(np.full(gamma, 1.0 - alpha), 1.0))
    # The probability that a row has 0, 1, … tokens and is not done.
    unfinished, expected = np.ones(1), 0.0
    while unfinished.sum() > 1e-12:
        expected += 1 - (1 - min(unfinished.sum(), 1.0)) ** rows
        unfinished = np.convolve(unfinished, advance)[:length]
    return expected


# Time


def iteration_time(gamma: Number, c: Number, verification_cost: VerificationCost = 1.0) -> Number:
    """Returns ``g c + T(g + 1)``, the time of an iteration (proof of Theorem 3.8), in target steps.

    Args:
      gamma: drafts per iteration.
      c: time of a draft step, in target steps.
      verification_cost: T(gamma + 1), in target steps: a number, or a function of gamma + 1. The
        paper assumes 1; it is more if compute is scarce, as on a CPU.
    """
    _check_gamma(gamma)
    _check_not_negative("c", c)
    if callable(verification_cost):
        verification_cost = verification_cost(gamma + 1)
    _check_not_negative("verification_cost", verification_cost)
    return gamma * c + verification_cost


def wall_time_improvement(
    alpha: Number, gamma: Number, c: Number, verification_cost: VerificationCost = 1.0
) -> Number:
    """Returns the speed-up, ``(1 - a^(g+1)) / ((1 - a) (g c + T(g + 1)))`` (Theorem 3.8).

    ``gamma``, ``c`` and ``verification_cost``, T, are those of ``iteration_time``.
    """
    return expected_tokens(alpha, gamma) / iteration_time(gamma, c, verification_cost)


def guaranteed_improvement(alpha: Number, c: Number) -> Number:
    """Returns a speed-up that some gamma reaches: ``max(1, (1 + a) / (1 + c))`` (Corollary 3.9)."""
    _check_rate("alpha is", alpha)
    _check_not_negative("c", c)
    return np.maximum((1 + alpha) / (1 + c), 1.0)


def oracle_improvement(alpha: Number, c: Number) -> Number:
    """Returns the speed-up if an oracle stops each proposal before a rejection (section 3.5).

    An iteration makes ``1 / (1 - alpha)`` tokens, and no draft is rejected. At c below 1 no rule
    that adapts gamma gains more. The speed-up is infinite at alpha 1 and c 0.
    """
    _check_rate("alpha is", alpha)
    _check_not_negative("c", c)
    time = np.asarray((1 - alpha) + c * alpha)
    return np.divide(1.0, time, out=np.full(time.shape, np.inf), where=time > 0)[()]


# Operations


def operations_factor(alpha: Number, gamma: Number, c_hat: Number) -> Number:
    """Returns the operations per token, relative to those of plain decoding (Theorem 3.11).

    The ratio is ``(1 - a) (g c_hat + g + 1) / (1 - a^(g+1))``.
    """
    _check_not_negative("c_hat", c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


# The choice of gamma


def optimal_gamma(
    alpha: Number,
    c: Number,
    verification_cost: VerificationCost = 1.0,
    max_gamma: int = MAX_GAMMA,
) -> Number:
    """Returns the gamma with the largest speed-up of Theorem 3.8, or 0 if none is above 1.

    If several are equally good, the smallest is returned (section 3.5, Figure 3).

    Args:
      alpha: acceptance rate.
      c: time of a draft step, in target steps.
      verification_cost: T(m): one number for all m from 2 on, or a function of an array of m.
      max_gamma: the largest gamma to try: at c = 0 more is always better.
    """
    best = _improvements(alpha, c, verification_cost, max_gamma).argmax(axis=-1)
    return best if best.ndim else int(best)


def best_improvement(
    alpha: Number,
    c: Number,
    verification_cost: VerificationCost = 1.0,
    max_gamma: int = MAX_GAMMA,
) -> Number:
    """Returns the speed-up at the gamma that ``optimal_gamma`` returns, at least 1."""
    return _improvements(alpha, c, verification_cost, max_gamma).max(axis=-1)


def _improvements(alpha, c, verification_cost, max_gamma) -> Float[np.ndarray, "*rows gammas"]:
    """Returns the speed-ups of gamma = 0, 1, … ``max_gamma`` along a new last axis."""
    _check_not_negative("max_gamma", max_gamma)
    gammas = np.arange(max_gamma + 1)
    alpha, c = np.asarray(alpha)[..., None], np.asarray(c)[..., None]
    factors = wall_time_improvement(alpha, gammas, c, verification_cost)
    # A plain step takes time 1 for any cost of verification.
    return np.where(gammas == 0, 1.0, factors)


# Ranges


def _check(what: str, values: Number, is_good: Callable[[np.ndarray], np.ndarray], remedy: str):
    values = np.asarray(values)
    bad = values[~is_good(values)]
    if bad.size:
        raise InputError(f"{what} {bad.flat[0]}: {remedy}")


def _check_rate(what: str, rates: Number) -> None:
    _check(what, rates, lambda r: (r >= 0) & (r <= 1), "an acceptance rate is between 0 and 1")


def _check_gamma(gamma: Number) -> None:
    remedy = "give a whole number of at least 0"
    _check("gamma is", gamma, lambda values: (values >= 0) & (values == np.floor(values)), remedy)


def _check_not_negative(name: str, value: Number) -> None:
    _check(f"{name} is", value, lambda values: values >= 0, "give at least 0")


def _check_lenience(lenience: float) -> None:
    remedy = "give a number above 0, at most 1 (1 is lossless)"
    _check("lenience is", lenience, lambda values: (values > 0) & (values <= 1), remedy)
