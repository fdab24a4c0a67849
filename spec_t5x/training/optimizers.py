"""Optimizers by name, and their learning rates by step."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from spec_t5x.errors import InputError

Schedule = Callable[[int], float]

OPTIMIZERS = ("adamw", "adafactor")
DECAYS = ("constant", "rsqrt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Arguments of ``make_optimizer`` and ``make_schedule``."""

    name: str = "adamw"
    learning_rate: float = 1e-3
    warmup_steps: int = 1000
    decay: str = "constant"
    cooldown_steps: int = 0
    clip_norm: float = 1.0
    weight_decay: float = 0.0

    def build(self, steps: int) -> tuple[optax.GradientTransformation, Schedule]:
        """The optimizer and its schedule, for a training of ``steps`` steps."""
        schedule = make_schedule(
            peak=self.learning_rate,
            steps=steps,
            warmup_steps=self.warmup_steps,
            decay=self.decay,
            cooldown_steps=self.cooldown_steps,
        )
        settings = {"clip_norm": self.clip_norm, "weight_decay": self.weight_decay}
        return make_optimizer(self.name, schedule, **settings), schedule


def make_optimizer(
    name: str,
    schedule: Schedule,
    *,
    clip_norm: float = 1.0,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.98,
    min_dim_size_to_factor: int = 128,
) -> optax.GradientTransformation:
    """Clipping by the global norm, then the optimizer.

    Args:
        name: 'adamw', or 'adafactor' as T5 was trained: without momentum, and with
            each update in proportion to its parameter's own scale, so that its
            learning rates are relative (0.01 moves a matrix by 1% of its RMS).
        schedule: step -> learning rate.
        clip_norm: largest global norm of the gradient.
        weight_decay: AdamW's, of matrices only; Adafactor ignores it.
        b1, b2: AdamW's averages of the gradient and of its square.
        min_dim_size_to_factor: Adafactor keeps averages of squares by rows and columns of
            matrices that are at least so large both ways, and of smaller ones whole.

    Raises:
        InputError: an unknown name, or clip_norm <= 0.
    """
    if clip_norm <= 0:
        raise InputError(f"clip_norm is {clip_norm}: give a positive one")
    if name == "adamw":
        optimizer = optax.adamw(schedule, b1, b2, weight_decay=weight_decay, mask=_is_matrix)
    elif name == "adafactor":
        optimizer = optax.adafactor(
            schedule,
            min_dim_size_to_factor=min_dim_size_to_factor,
            multiply_by_parameter_scale=True,
        )
    else:
        raise InputError(f"no optimizer is called {name!r}: choose {' or '.join(OPTIMIZERS)}")
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


def _is_matrix(params):
    return jax.tree.map(lambda array: array.ndim > 1, params)


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
