"""The paper's closed forms, and what practice needs beyond them.

    alpha    acceptance rate: how likely a draft is to be accepted, on average
    beta     the same at one place, given the text before it (Definition 3.1)
    gamma    drafts per iteration
    c        time of a draft step over time of a target step (Definition 3.7)
    c_hat    arithmetic operations of a draft step over those of a target step
    T(m)     time of the target's call over m = gamma + 1 tokens, in target steps

Arguments are numbers or arrays, which broadcast against one another, and are computed with
in numpy; the functions of distributions compute in the library of the array that they are
given, also inside ``jax.jit``. A value outside its range is an ``InputError``, in all of them.

The closed forms take betas as independent and alike. Where they are known for each of the
gamma places of an iteration, ``expected_tokens_by_position`` needs no such assumption.
"""

import functools
from collections.abc import Callable

import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.types import Array, Float, Integer

Number = int | float | np.generic | Array
# A number, or a function of m = gamma + 1.
VerificationCost = Number | Callable[[Array], Array]

# The largest gamma that is looked at where the user does not say: more than any of
# Figure 3.
MAX_GAMMA = 128


# How much is accepted, of distributions


def d_lk(
    target_probs: Float[Array, "*rows vocab"], draft_probs: Float[Array, "*rows vocab"]
) -> Number:
    """``sum |p - M|`` with ``M = (p + q) / 2`` (Definition 3.2).

    A symmetric divergence in [0, 1]; 0 for equal distributions, 1 for disjoint ones
    (Corollary 3.4). It equals ``1 - beta(p, q)`` (Lemma 3.3), the total variation.
    """
    middle = (target_probs + draft_probs) / 2
    return abs(target_probs - middle).sum(axis=-1)


def beta(
    target_probs: Float[Array, "*rows vocab"],
    draft_probs: Float[Array, "*rows vocab"],
    lenience: float = 1.0,
) -> Number:
    """``sum min(p / l, q)``: how likely a draft is to be accepted (Theorem 3.5).

    Its mean over the places of texts that the target generated is alpha (Corollary 3.6).

    Args:
      target_probs: p, after standardization.
      draft_probs: q, what the draft is drawn from.
      lenience: l of section A.5, in (0, 1]; 1 is Algorithm 1.
    """
    _check_lenience(lenience)
    xp = target_probs.__array_namespace__()
    return xp.minimum(target_probs / lenience, draft_probs).sum(axis=-1)


def beta_of_lenient_argmax(
    target_probs: Float[Array, "*rows vocab"],
    draft_probs: Float[Array, "*rows vocab"],
    lenience: float,
) -> Number:
    """Chance that ``p(x) >= l max(p)`` for a draft x from q (section A.5, argmax).

    The paper prints the inequality reversed.

    Args:
      target_probs: p at temperature 1, before it is made argmax.
      draft_probs: q, what the draft is drawn from: at temperature 0 all on one token.
      lenience: l, in (0, 1].
    """
    _check_lenience(lenience)
    xp = target_probs.__array_namespace__()
    acceptable = target_probs >= lenience * target_probs.max(axis=-1, keepdims=True)
    return xp.where(acceptable, draft_probs, 0.0).sum(axis=-1)


def beta_of_rejection_sampling(
    target_probs: Float[np.ndarray, "*rows vocab"], draft_probs: Float[np.ndarray, "*rows vocab"]
) -> Number:
    """``sum_x p(x) min_x' q(x') / p(x')``, never above ``beta`` (section A.2).

    The minimum is over the tokens that the target may emit.
    """
    possible = target_probs > 0
    ratios = np.divide(
        draft_probs, target_probs, out=np.full_like(target_probs, np.inf), where=possible
    )
    # The target's probabilities sum to 1.
    return ratios.min(axis=-1)


# Tokens per iteration


def expected_tokens(alpha: Number, gamma: Number) -> Number:
    """Tokens per iteration, ``(1 - a^(g+1)) / (1 - a)`` (Equation 1)."""
    _check_rate("alpha is", alpha)
    _check_gamma(gamma)
    alpha, gamma = np.asarray(alpha, float), np.asarray(gamma, float)
    # As (e^((g+1) log a) - 1) / (e^(log a) - 1), which loses no digits near a = 1; there it
    # is 0 / 0.
    inside = (alpha > 0) & (alpha < 1)
    log = np.log(np.where(inside, alpha, 0.5))
    geometric = np.expm1((gamma + 1) * log) / np.expm1(log)
    return np.where(inside, geometric, np.where(alpha == 0, 1.0, gamma + 1))[()]


def expected_tokens_by_position(betas: Float[Array, "*rows gamma"]) -> Number:
    """Tokens per iteration from the acceptance rate of each place: exact, no i.i.d.

    ``1 + b_1 + b_1 b_2 + … + b_1 … b_gamma``: the i-th draft enters the text if all up to
    it are accepted.

    Args:
      betas: how often the i-th draft is accepted *given that those before it were*
        (``conditional_acceptance``).
    """
    _check_rate("betas hold", betas)
    return 1 + np.cumprod(betas, axis=-1).sum(axis=-1)


def conditional_acceptance(
    accepted_by_position: Integer[Array, "gamma"], verified_by_position: Integer[Array, "gamma"]
) -> Float[np.ndarray, "gamma"]:
    """How often the i-th draft was accepted where it was verified: those before it were.

    Args:
      accepted_by_position: iterations whose i-th draft was accepted
        (``DecodeStats.accepted_by_position``, summed over rows).
      verified_by_position: iterations whose i-th draft was verified
        (``DecodeStats.verified_by_position``, likewise).

    Returns:
      Rates whose ``expected_tokens_by_position`` are the tokens to be expected of an
      iteration with all gamma drafts that no end of the text cuts. 0 for places at which
      nothing was verified.
    """
    return np.asarray(accepted_by_position) / np.maximum(np.asarray(verified_by_position), 1)


def length_pmf(alpha: float, gamma: int) -> Float[np.ndarray, "lengths"]:
    """How likely an iteration is to give 1, 2, … gamma + 1 tokens, under i.i.d. betas.

    A capped geometric distribution with success probability ``1 - alpha`` (section 3.1).
    """
    _check_rate("alpha is", alpha)
    _check_gamma(gamma)
    reached = float(alpha) ** np.arange(gamma + 1)
    return reached * np.append(np.full(gamma, 1.0 - alpha), 1.0)


@functools.lru_cache
def expected_iterations(alpha: float, gamma: int, length: int, rows: int) -> float:
    """Iterations until the last of ``rows`` rows has ``length`` tokens.

    Exact, from the distribution of a row's tokens after each iteration (section 3.1); rows
    advance independently.

    Args:
      alpha: chance that a draft is accepted, i.i.d.
      gamma: drafts per iteration, at least 1.
      length: tokens of each row.
      rows: rows of the batch.
    """
    advance = np.concatenate([[0.0], length_pmf(np.float64(alpha), gamma)])
    # The probability that a row has 0, 1, … tokens and is not done.
    unfinished, expected = np.ones(1), 0.0
    while unfinished.sum() > 1e-12:
        expected += 1 - (1 - min(unfinished.sum(), 1.0)) ** rows
        unfinished = np.convolve(unfinished, advance)[:length]
    return expected


# Time


def iteration_time(gamma: Number, c: Number, verification_cost: VerificationCost = 1.0) -> Number:
    """``g c + T(g + 1)``: time of an iteration in target steps (proof of Theorem 3.8).

    Args:
      gamma: drafts per iteration.
      c: time of a draft step, in target steps.
      verification_cost: T(gamma + 1), in target steps: a number, or a function of
        gamma + 1. The paper assumes 1; where compute is scarce, as on a CPU, it is more.
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
    """Factor over plain decoding, ``(1 - a^(g+1)) / ((1 - a) (g c + 1))`` (Theorem 3.8).

    Args:
      alpha: acceptance rate, taken as i.i.d.
      gamma, c, verification_cost: as in ``iteration_time``.
    """
    return expected_tokens(alpha, gamma) / iteration_time(gamma, c, verification_cost)


def guaranteed_improvement(alpha: Number, c: Number) -> Number:
    """What some gamma reaches at least: ``(1 + a) / (1 + c)`` if a > c (Corollary 3.9).

    Else 1, the factor of gamma = 0: nothing is drafted.
    """
    _check_rate("alpha is", alpha)
    _check_not_negative("c", c)
    return np.maximum((1 + alpha) / (1 + c), 1.0)


def oracle_improvement(alpha: Number, c: Number) -> Number:
    """Factor over plain decoding if an oracle said when to stop drafting (section 3.5).

    ``1 / (1 - alpha)`` tokens per iteration, and no draft made in vain: a bound for any
    rule that adapts gamma.
    """
    _check_rate("alpha is", alpha)
    _check_not_negative("c", c)
    time = np.asarray((1 - alpha) + c * alpha)
    return np.divide(1.0, time, out=np.full(time.shape, np.inf), where=time > 0)[()]


# Operations and memory


def operations_factor(alpha: Number, gamma: Number, c_hat: Number) -> Number:
    """Operations per token over plain decoding's (Theorem 3.11).

    ``(1 - a) (g ch + g + 1) / (1 - a^(g+1))``.
    """
    _check_not_negative("c_hat", c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def memory_factor(alpha: Number, gamma: Number, c_bytes: Number = 0.0) -> Number:
    """Memory read per token over plain decoding's (section 3.4).

    ``(1 - a) (g cb + 1) / (1 - a^(g+1))``: an iteration reads the target's weights and
    cache once. The paper leaves the draft out, ``c_bytes = 0``: reads shrink by Equation 1.

    Args:
      alpha: acceptance rate, taken as i.i.d.
      gamma: drafts per iteration.
      c_bytes: what a draft step reads over what a target step reads.
    """
    _check_not_negative("c_bytes", c_bytes)
    return (gamma * c_bytes + 1) / expected_tokens(alpha, gamma)


# The choice of gamma


def optimal_gamma(
    alpha: Number,
    c: Number,
    verification_cost: VerificationCost = 1.0,
    max_gamma: int = MAX_GAMMA,
) -> Number:
    """The gamma that maximizes Theorem 3.8 (section 3.5, Figure 3); 0 where none gains.

    Args:
      alpha: acceptance rate, taken as i.i.d.
      c: time of a draft step, in target steps.
      verification_cost: T(m): one number for all m from 2 on, or a function of an array of m.
      max_gamma: the largest gamma to look at: without cost (c = 0) more is always better.

    Returns:
      Whole numbers, the smallest of several that are equally good.
    """
    best = _improvements(alpha, c, verification_cost, max_gamma).argmax(axis=-1)
    return best if best.ndim else int(best)


def best_improvement(
    alpha: Number,
    c: Number,
    verification_cost: VerificationCost = 1.0,
    max_gamma: int = MAX_GAMMA,
) -> Number:
    """The factor at the optimal gamma, at least 1; arguments as of ``optimal_gamma``."""
    return _improvements(alpha, c, verification_cost, max_gamma).max(axis=-1)


def _improvements(alpha, c, verification_cost, max_gamma) -> Float[np.ndarray, "*rows gammas"]:
    """The factor of gamma = 0, 1, … along a last axis."""
    _check_not_negative("max_gamma", max_gamma)
    gammas = np.arange(max_gamma + 1)
    alpha, c = np.asarray(alpha)[..., None], np.asarray(c)[..., None]
    factors = wall_time_improvement(alpha, gammas, c, verification_cost)
    # gamma = 0 is a plain step, whatever the cost of verification.
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
    is_whole = lambda g: (g >= 0) & (g == np.floor(g))  # noqa: E731
    _check("gamma is", gamma, is_whole, "give a whole number of at least 0")


def _check_not_negative(name: str, value: Number) -> None:
    _check(f"{name} is", value, lambda values: values >= 0, "give at least 0")


def _check_lenience(lenience: float) -> None:
    remedy = "give a number above 0, at most 1 (1 is lossless)"
    _check("lenience is", lenience, lambda values: (values > 0) & (values <= 1), remedy)
