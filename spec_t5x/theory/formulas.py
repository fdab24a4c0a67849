"""The paper's closed forms, and what practice needs beyond them.

    alpha    acceptance rate: how likely a draft is to be accepted, on average
    beta     the same at one place, given the text before it (Definition 3.1)
    gamma    drafts per iteration
    c        time of a draft step over time of a target step (Definition 3.7)
    c_hat    arithmetic operations of a draft step over those of a target step
    T(m)     time of the target's call over m = gamma + 1 tokens, in target steps

All arguments are numbers or arrays, which broadcast against one another. On numbers and
numpy arrays the functions compute in numpy, on JAX arrays (also traced ones, inside
``jit``) in ``jax.numpy``. What is outside its range is an ``InputError``, except in
traced arrays, whose values are not known.

The closed forms take betas as independent and alike. Where they are known for each of the
gamma places of an iteration, the functions ``…_by_position`` need no such assumption.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
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
    xp = _namespace(target_probs, draft_probs)
    middle = (target_probs + draft_probs) / 2
    return _plain(xp.sum(xp.abs(target_probs - middle), axis=-1))


def beta(
    target_probs: Float[Array, "*rows vocab"],
    draft_probs: Float[Array, "*rows vocab"],
    lenience: Number = 1.0,
) -> Number:
    """``sum min(p / l, q)``: how likely a draft is to be accepted (Theorem 3.5).

    Args:
      target_probs: p, after standardization.
      draft_probs: q, what the draft is drawn from.
      lenience: l of section A.5, in (0, 1]; 1 is Algorithm 1.

    Raises:
      InputError: a lenience outside its range.
    """
    _check_lenience(lenience)
    xp = _namespace(target_probs, draft_probs, lenience)
    return _plain(xp.sum(xp.minimum(target_probs / lenience, draft_probs), axis=-1))


def beta_of_lenient_argmax(
    target_probs: Float[Array, "*rows vocab"],
    draft_probs: Float[Array, "*rows vocab"],
    lenience: Number,
) -> Number:
    """Chance that ``p(x) >= l max(p)`` for a draft x from q (section A.5, argmax).

    The paper prints the inequality reversed.

    Args:
      target_probs: p at temperature 1, before it is made argmax.
      draft_probs: q, what the draft is drawn from: at temperature 0 all on one token.
      lenience: l, in (0, 1].

    Raises:
      InputError: a lenience outside its range.
    """
    _check_lenience(lenience)
    xp = _namespace(target_probs, draft_probs, lenience)
    acceptable = target_probs >= lenience * xp.max(target_probs, axis=-1, keepdims=True)
    return _plain(xp.sum(xp.where(acceptable, draft_probs, 0.0), axis=-1))


def beta_of_rejection_sampling(
    target_probs: Float[Array, "*rows vocab"], draft_probs: Float[Array, "*rows vocab"]
) -> Number:
    """``sum_x p(x) min_x' q(x') / p(x')``, never above ``beta`` (section A.2).

    The minimum is over the tokens that the target may emit.
    """
    xp = _namespace(target_probs, draft_probs)
    possible = target_probs > 0
    ratios = draft_probs / xp.where(possible, target_probs, 1.0)
    # The target's probabilities sum to 1.
    return _plain(xp.min(xp.where(possible, ratios, xp.inf), axis=-1))


def alpha(
    target_probs: Float[Array, "*rows vocab"],
    draft_probs: Float[Array, "*rows vocab"],
    lenience: Number = 1.0,
) -> Number:
    """The mean of beta over all rows, ``E(sum min(p, q))`` (Corollary 3.6; A.5 for l).

    The rows are the places of texts that the target generated.

    Raises:
      InputError: a lenience outside its range.
    """
    betas = beta(target_probs, draft_probs, lenience)
    return _plain(_namespace(betas).mean(betas))


# Tokens per iteration


def expected_tokens(alpha: Number, gamma: Number) -> Number:
    """Tokens per iteration, ``(1 - a^(g+1)) / (1 - a)`` (Equation 1).

    Raises:
      InputError: alpha outside [0, 1], or gamma no whole number from 0.
    """
    _check_alpha(alpha)
    _check_gamma(gamma)
    xp = _namespace(alpha, gamma)
    alpha, gamma = _float(xp, alpha), _float(xp, gamma)
    # As (e^((g+1) log a) - 1) / (e^(log a) - 1), which loses no digits near a = 1; there it
    # is 0 / 0. A logarithm of 0 is never taken: its derivative is infinite.
    inside = (alpha > 0) & (alpha < 1)
    log = xp.log(xp.where(inside, alpha, 0.5))
    geometric = xp.expm1((gamma + 1) * log) / xp.expm1(log)
    return _plain(xp.where(inside, geometric, xp.where(alpha == 0, 1.0, gamma + 1)))


def expected_tokens_by_position(betas: Float[Array, "*rows gamma"]) -> Number:
    """Tokens per iteration from the acceptance rate of each place: exact, no i.i.d.

    ``1 + b_1 + b_1 b_2 + … + b_1 … b_gamma``: the i-th draft enters the text if all up to
    it are accepted.

    Args:
      betas: how often the i-th draft is accepted *given that those before it were*
        (``conditional_acceptance``).

    Raises:
      InputError: a rate outside [0, 1].
    """
    _check_rates(betas)
    xp = _namespace(betas)
    return _plain(1 + xp.sum(xp.cumprod(betas, axis=-1), axis=-1))


def conditional_acceptance(
    accepted_by_position: Integer[Array, "gamma"], verified_by_position: Integer[Array, "gamma"]
) -> Float[Array, "gamma"]:
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
    xp = _namespace(accepted_by_position, verified_by_position)
    verified = xp.asarray(verified_by_position)
    return xp.asarray(accepted_by_position) / xp.where(verified > 0, verified, 1)


def length_pmf(alpha: Number, gamma: int) -> Float[Array, "*rows lengths"]:
    """How likely an iteration is to give 1, 2, … gamma + 1 tokens, under i.i.d. betas.

    A capped geometric distribution with success probability ``1 - alpha`` (section 3.1).

    Raises:
      InputError: alpha outside [0, 1], or gamma no whole number from 0.
    """
    _check_alpha(alpha)
    _check_gamma(gamma)
    xp = _namespace(alpha)
    rates = xp.repeat(_float(xp, alpha)[..., None], gamma, axis=-1)
    return length_pmf_by_position(rates)


def length_pmf_by_position(
    betas: Float[Array, "*rows gamma"],
) -> Float[Array, "*rows gamma+1"]:
    """How likely an iteration is to give 1, 2, … gamma + 1 tokens.

    Args:
      betas: acceptance rate of each place, given that the drafts before it were accepted.

    Raises:
      InputError: a rate outside [0, 1].
    """
    _check_rates(betas)
    xp = _namespace(betas)
    one = xp.ones((*betas.shape[:-1], 1), betas.dtype)
    reached = xp.concatenate([one, xp.cumprod(betas, axis=-1)], axis=-1)
    rejected = xp.concatenate([1 - betas, one], axis=-1)
    return reached * rejected


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

    Raises:
      InputError: gamma no whole number from 0, or a negative time.
    """
    _check_gamma(gamma)
    _check_not_negative("c", c)
    if callable(verification_cost):
        verification_cost = verification_cost(gamma + 1)
    _check_not_negative("verification_cost", verification_cost)
    return _plain(gamma * c + verification_cost)


def wall_time_improvement(
    alpha: Number, gamma: Number, c: Number, verification_cost: VerificationCost = 1.0
) -> Number:
    """Factor over plain decoding, ``(1 - a^(g+1)) / ((1 - a) (g c + 1))`` (Theorem 3.8).

    Args:
      alpha: acceptance rate, taken as i.i.d.
      gamma, c, verification_cost: as in ``iteration_time``.

    Raises:
      InputError: a value outside its range.
    """
    return expected_tokens(alpha, gamma) / iteration_time(gamma, c, verification_cost)


def guaranteed_improvement(alpha: Number, c: Number) -> Number:
    """What some gamma reaches at least: ``(1 + a) / (1 + c)`` if a > c (Corollary 3.9).

    Else 1, the factor of gamma = 0: nothing is drafted.

    Raises:
      InputError: a value outside its range.
    """
    _check_alpha(alpha)
    _check_not_negative("c", c)
    xp = _namespace(alpha, c)
    alpha, c = _float(xp, alpha), _float(xp, c)
    return _plain(xp.where(alpha > c, (1 + alpha) / (1 + c), 1.0))


def oracle_tokens(alpha: Number) -> Number:
    """``1 / (1 - a)`` tokens per iteration, if an oracle said when to stop (section 3.5).

    Raises:
      InputError: alpha outside [0, 1].
    """
    _check_alpha(alpha)
    return _reciprocal(1 - alpha)


def oracle_improvement(alpha: Number, c: Number) -> Number:
    """Factor over plain decoding if an oracle said when to stop drafting (section 3.5).

    ``1 / (1 - alpha)`` tokens per iteration, and no draft made in vain: a bound for any
    rule that adapts gamma.

    Raises:
      InputError: a value outside its range.
    """
    _check_alpha(alpha)
    _check_not_negative("c", c)
    return _reciprocal((1 - alpha) + c * alpha)


# Operations and memory


def operations_factor(alpha: Number, gamma: Number, c_hat: Number) -> Number:
    """Operations per token over plain decoding's (Theorem 3.11).

    ``(1 - a) (g ch + g + 1) / (1 - a^(g+1))``.

    Raises:
      InputError: a value outside its range.
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
      c_bytes: what a draft step reads over what a target step reads (``models.costs``).

    Raises:
      InputError: a value outside its range.
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
      verification_cost: T(m): one number for all m from 2 on, a function of an array of
        m, or measured costs ``[max]`` of m = 1, 2, …, of which T(1) is the unit. gamma is
        then at most ``max - 1``.
      max_gamma: the largest gamma to look at: without cost (c = 0) more is always better.

    Returns:
      Whole numbers, the smallest of several that are equally good.

    Raises:
      InputError: a value outside its range.
    """
    factors = _improvements(alpha, c, verification_cost, max_gamma)
    return _plain(_namespace(factors).argmax(factors, axis=-1))


def best_improvement(
    alpha: Number,
    c: Number,
    verification_cost: VerificationCost = 1.0,
    max_gamma: int = MAX_GAMMA,
) -> Number:
    """The factor at the optimal gamma, at least 1; arguments as of ``optimal_gamma``."""
    factors = _improvements(alpha, c, verification_cost, max_gamma)
    return _plain(_namespace(factors).max(factors, axis=-1))


def _improvements(alpha, c, verification_cost, max_gamma) -> Float[Array, "*rows gammas"]:
    """The factor of gamma = 0, 1, … along a last axis."""
    xp = _namespace(alpha, c)
    _check_not_negative("c", c)
    alpha, c = _add_axis(xp, alpha), _add_axis(xp, c)
    rank = max(alpha.ndim, c.ndim, 1)
    gammas, costs = _gammas_and_costs(xp, verification_cost, max_gamma, rank)
    return expected_tokens(alpha, gammas) / (gammas * c + costs)


def _gammas_and_costs(xp, verification_cost: VerificationCost, max_gamma: int, rank: int):
    """Gammas 0, 1, … and the costs of verifying them, on the last of ``rank`` axes.

    gamma = 0 is a plain step, whatever the cost of verification.
    """
    if max_gamma < 0:
        raise InputError(f"max_gamma is {max_gamma}: give at least 0")
    gammas = np.arange(max_gamma + 1)
    costs = verification_cost
    if callable(costs):
        costs = costs(gammas + 1)
    if np.ndim(costs) == 1:
        if _first_bad(costs[0], lambda cost: np.isclose(cost, 1.0, rtol=0.05)) is not None:
            raise InputError(
                f"verification_cost is {costs[0]} for one token: give costs in steps of the "
                "target, which verifies one token in one"
            )
        gammas = gammas[: len(costs)]
        costs = costs[: len(gammas)]
    _check_not_negative("verification_cost", costs)
    costs = xp.where(gammas == 0, 1.0, xp.asarray(costs))
    shape = (1,) * (rank - 1) + (-1,)
    return xp.reshape(xp.asarray(gammas), shape), xp.reshape(costs, shape)


# Numbers and arrays alike


def _namespace(*values: Number):
    """``jax.numpy`` if any value is JAX's, else numpy."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


def _float(xp, value: Number) -> Array:
    value = xp.asarray(value)
    return value if xp.issubdtype(value.dtype, xp.floating) else value.astype(float)


def _add_axis(xp, value: Number) -> Array:
    """With a last axis to broadcast along; a number needs none."""
    value = _float(xp, value)
    return value[..., None] if value.ndim else value


def _plain(value: Number) -> Number:
    """A number of Python's instead of numpy's array without axes."""
    if isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0:
        return value.item()
    return value


def _reciprocal(value: Number) -> Number:
    xp = _namespace(value)
    value = _float(xp, value)
    return _plain(xp.where(value > 0, 1 / xp.where(value > 0, value, 1.0), xp.inf))


def _first_bad(values: Number, is_good: Callable[[np.ndarray], np.ndarray]):
    """The first of concrete values that is not good, or None."""
    if isinstance(values, jax.core.Tracer):
        return None
    values = np.asarray(values)
    bad = values[~is_good(values)]
    return bad.flat[0] if bad.size else None


def _check_alpha(alpha: Number) -> None:
    bad = _first_bad(alpha, lambda values: (values >= 0) & (values <= 1))
    if bad is not None:
        raise InputError(f"alpha is {bad}: an acceptance rate is between 0 and 1")


def _check_rates(betas: Array) -> None:
    bad = _first_bad(betas, lambda values: (values >= 0) & (values <= 1))
    if bad is not None:
        raise InputError(f"betas hold {bad}: an acceptance rate is between 0 and 1")


def _check_gamma(gamma: Number) -> None:
    bad = _first_bad(gamma, lambda values: (values >= 0) & (values == np.floor(values)))
    if bad is not None:
        raise InputError(f"gamma is {bad}: give a whole number of at least 0")


def _check_lenience(lenience: Number) -> None:
    bad = _first_bad(lenience, lambda values: (values > 0) & (values <= 1))
    if bad is not None:
        raise InputError(f"lenience is {bad}: give a number above 0, at most 1 (1 is lossless)")


def _check_not_negative(name: str, value: Number) -> None:
    bad = _first_bad(value, lambda values: values >= 0)
    if bad is not None:
        raise InputError(f"{name} is {bad}: give at least 0")
