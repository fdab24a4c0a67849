"""Learning rates by step: warm-up, a plateau or decay, a linear cool-down to 0."""

from collections.abc import Callable

import jax.numpy as jnp

from spec_t5x.errors import InputError

Schedule = Callable[[int], float]

DECAYS = ("constant", "rsqrt")


def make_schedule(
    *,
    peak: float,
    steps: int,
    warmup_steps: int = 0,
    decay: str = "constant",
    cooldown_steps: int = 0,
) -> Schedule:
    """The learning rate as a function of the step, counted from 0.

    It rises linearly, reaching ``peak`` at step ``warmup_steps - 1``; then it stays
    ('constant') or falls as ``sqrt(warmup_steps / step)`` ('rsqrt'); over the last
    ``cooldown_steps`` it goes linearly to 0, which it would reach at step
    ``steps``, the first that is not taken.

    Args:
        peak: the largest learning rate.
        steps: number of steps of the whole training.
        warmup_steps, cooldown_steps: their sum is at most ``steps``.
        decay: one of ``DECAYS``.

    Raises:
        InputError: an unknown decay, or numbers out of range.
    """
    if decay not in DECAYS:
        raise InputError(f"decay is {decay!r}: choose {' or '.join(DECAYS)}")
    if peak <= 0:
        raise InputError(f"the peak learning rate is {peak}: give a positive one")
    if min(warmup_steps, cooldown_steps) < 0 or warmup_steps + cooldown_steps > steps:
        raise InputError(
            f"{warmup_steps} warm-up and {cooldown_steps} cool-down steps do not fit "
            f"into {steps} steps: lower them"
        )

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        rate = jnp.float32(peak)
        if warmup_steps:
            # From 1 / warmup_steps, so that the first step is not wasted.
            rate *= jnp.minimum(1.0, (step + 1.0) / warmup_steps)
        if decay == "rsqrt":
            start = max(warmup_steps, 1)
            rate *= jnp.sqrt(start / jnp.maximum(step, start))
        if cooldown_steps:
            rate *= jnp.clip((steps - step) / cooldown_steps, 0.0, 1.0)
        return rate

    return schedule
