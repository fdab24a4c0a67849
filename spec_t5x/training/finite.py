"""A run that has diverged stops with a message that says where."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from spec_t5x.errors import InputError
from spec_t5x.training.losses import LossSums
from spec_t5x.training.optimizers import Schedule
from spec_t5x.types import PyTree

# So many of the parameters that are not finite are named.
NAMED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTaken:
    """A step, for the message if its loss is not finite."""

    number: int  # counted from 1, as the log counts
    schedule: Schedule
    # Of the source and of the target text: rows, tokens.
    source: Sequence[int]
    target: Sequence[int]

    def __str__(self) -> str:
        rows, source = self.source
        rate = float(self.schedule(self.number - 1))
        return (
            f"learning rate {rate:.3g}, batch {self.number - 1} of {rows} rows of "
            f"{source} source and {self.target[1]} target tokens"
        )


def check_sums(
    sums: LossSums, step: StepTaken, params: PyTree, describe_latest: Callable[[], str]
) -> None:
    """Stops a run whose loss or gradient is not finite.

    Args:
        sums: of the step, fetched.
        step: which it was.
        params: as they are now, for the message only.
        describe_latest: says which checkpoint there is.

    Raises:
        InputError: the loss or the gradient's norm is infinite or not a number.
    """
    norm = sums.gradient_norm
    if math.isfinite(sums.loss) and (norm is None or math.isfinite(norm)):
        return
    loss = float(sums.loss) / max(float(sums.num_tokens), 1.0)
    gradient = "" if norm is None else f" and a gradient of norm {float(norm):.3g}"
    raise InputError(
        f"step {step.number} has a loss of {loss:.3g}{gradient} ({step}; {_state_of(params)}); "
        f"{_remedy(describe_latest)}"
    )


def check_params(params: PyTree, step: int, describe_latest: Callable[[], str]) -> None:
    """Stops a run before parameters that are not finite are written or measured.

    Raises:
        InputError: some are infinite or not numbers.
    """
    if not _all_finite(params):
        raise InputError(f"{_state_of(params)} after step {step}; {_remedy(describe_latest)}")


def check_measured(value: float, what: str, step: int, describe_latest: Callable[[], str]) -> None:
    """Stops a run whose parameters are finite and whose evaluation is not.

    Raises:
        InputError: the value is infinite or not a number.
    """
    if not math.isfinite(value):
        raise InputError(f"the {what} after step {step} is {value:.3g}; {_remedy(describe_latest)}")


def _remedy(describe_latest: Callable[[], str]) -> str:
    return (
        f"{describe_latest()}: lower OptimizerOptions.learning_rate, or check that batch, and run "
        "the same command again"
    )


@jax.jit
def _finite_leaves(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)), params)


def _all_finite(params: PyTree) -> bool:
    return bool(np.all(jax.device_get(jax.tree.leaves(_finite_leaves(params)))))


def _state_of(params: PyTree) -> str:
    finite = flatten_dict(jax.device_get(_finite_leaves(params)), sep="/")
    names = sorted(name for name, is_finite in finite.items() if not is_finite)
    if not names:
        return "all parameters finite"
    more = ", ..." if len(names) > NAMED else ""
    return f"{len(names)} of {len(finite)} parameters not finite: {', '.join(names[:NAMED])}{more}"
