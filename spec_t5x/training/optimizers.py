"""Optimizers by name."""

import jax
import optax

from spec_t5x.errors import InputError
from spec_t5x.training.schedules import Schedule

OPTIMIZERS = ("adamw", "adafactor")


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
