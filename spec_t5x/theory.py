"""The paper's closed forms. alpha: acceptance rate; gamma: drafts per iteration;
c: time of a draft step over time of a target step."""

from spec_t5x.errors import InputError


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per iteration, ``(1 - a^(g+1)) / (1 - a)`` (Equation 1)."""
    _check(alpha, gamma)
    # Summed, so that alpha = 1 (gamma + 1 tokens) needs no case of its own.
    return sum(alpha**i for i in range(gamma + 1))


def wall_time_improvement(
    alpha: float, gamma: int, c: float, verification_cost: float = 1.0
) -> float:
    """Factor over plain decoding (Theorem 3.8).

    Args:
      alpha: acceptance rate, taken as i.i.d.
      gamma: drafts per iteration.
      c: cost of a draft step, in target steps.
      verification_cost: cost of the call over gamma + 1 tokens, in target steps. The
        paper assumes 1; where compute is scarce, as on a CPU, it is more.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + verification_cost)


def oracle_improvement(alpha: float, c: float) -> float:
    """Factor over plain decoding if an oracle said when to stop drafting (section 3.5).

    ``1 / (1 - alpha)`` tokens per iteration, and no draft made in vain: a bound for any
    rule that adapts gamma.
    """
    _check(alpha, 0)
    time = (1 - alpha) + c * alpha
    return 1 / time if time > 0 else float("inf")


def _check(alpha: float, gamma: int) -> None:
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha is {alpha}: an acceptance rate is between 0 and 1")
    if gamma < 0:
        raise InputError(f"gamma is {gamma}: give at least 0")
