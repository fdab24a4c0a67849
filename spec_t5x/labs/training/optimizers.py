"""Optimizers by name, and their learning rates by step."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from spec_t5x.errors import InputError, check_at_least, check_choice, check_unused
from spec_t5x.options import check_types

Schedule = Callable[[int], float]

OPTIMIZERS = ("adamw", "adafactor")
DECAYS = ("constant", "rsqrt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """An optimizer and its learning rates; gradients are clipped by their global norm."""

    # 'adamw', or 'adafactor', with which T5 was trained: no momentum, and updates scaled by their
    # parameter's RMS, so that learning rates are relative (0.01 moves a matrix by 1 % of its RMS).
    name: str = "adamw"
    # The largest learning rate, at the end of the warm-up.
    learning_rate: float = 1e-3
    # Number of steps in which the rate rises linearly.
    warmup_steps: int = 1000
    # After the warm-up the rate is 'constant', or falls as sqrt(warmup_steps / step) ('rsqrt').
    decay: str = "constant"
    # Number of last steps in which the rate falls linearly to 0, reached after the last step.
    cooldown_steps: int = 0
    clip_norm: float = 1.0
    # AdamW's weight decay, of arrays with two axes or more; Adafactor has none.
    weight_decay: float = 0.0

    def __post_init__(self):
        check_types(self)
        check_choice("optimizer", self.name, OPTIMIZERS)
        check_choice("decay", self.decay, DECAYS)
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            # So that NaN is refused, too.
            if not value > 0:
                raise InputError(f"{name} is {value}: give a positive one")
        check_at_least(self, warmup_steps=0, cooldown_steps=0)
        if self.name == "adafactor":
            check_unused(self, "adafactor has none", "weight_decay")

    def build(self, steps: int) -> tuple[optax.GradientTransformation, Schedule]:
        """Returns the optimizer and its schedule, for a training of ``steps`` steps.

        Raises:
            InputError: warm-up and cool-down take more steps than that.
        """
        schedule = self.schedule(steps)
        return self.optimizer(schedule), schedule

    def optimizer(self, schedule: Schedule) -> optax.GradientTransformation:
        """Chains gradient clipping and the optimizer, with the learning rates of ``schedule``.

        Adafactor stores averages of squared gradients by row and by column for matrices of at
        least 128 rows and columns, and elementwise for smaller arrays.
        """
        if self.name == "adamw":
            decay = {"weight_decay": self.weight_decay, "mask": _is_matrix}
            optimizer = optax.adamw(schedule, b2=0.98, **decay)
        else:
            optimizer = optax.adafactor(schedule, multiply_by_parameter_scale=True)
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), optimizer)

    def schedule(self, steps: int) -> Schedule:
        """Returns the learning rate as a function of the step, counted from 0."""
        peak, warmup, cooldown = self.learning_rate, self.warmup_steps, self.cooldown_steps
        if warmup + cooldown > steps:
            raise InputError(
                f"{warmup} warm-up and {cooldown} cool-down steps do not fit into {steps} steps: "
                "lower OptimizerOptions.warmup_steps and OptimizerOptions.cooldown_steps"
            )

        def schedule(step):
            step = jnp.asarray(step, jnp.float32)
            rate = jnp.float32(peak)
            if warmup:
                # Starts at 1 / warmup, because a first step with rate 0 would change nothing.
                rate *= jnp.minimum(1.0, (step + 1.0) / warmup)
            if self.decay == "rsqrt":
                start = max(warmup, 1)
                rate *= jnp.sqrt(start / jnp.maximum(step, start))
            if cooldown:
                rate *= jnp.clip((steps - step) / cooldown, 0.0, 1.0)
            return rate

        return schedule


def _is_matrix(params):
    return jax.tree.map(lambda array: array.ndim > 1, params)
