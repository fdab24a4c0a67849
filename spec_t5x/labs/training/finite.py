"""Parameters that are not finite numbers: what a run that diverges stops with."""

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from spec_t5x.types import PyTree

# So many of the parameters that are not finite are named.
_NAMED = 3


class DivergedError(Exception):
    """A loss, a gradient, parameters or a measurement are not finite."""


def check_params(params: PyTree, step: int) -> None:
    """Raises ``DivergedError`` before parameters that are not finite are written or measured."""
    state = state_of(params)
    if state != _FINITE:
        raise DivergedError(f"{state} after step {step}")


def state_of(params: PyTree) -> str:
    """Which of the parameters are not finite, in words."""
    finite = flatten_dict(jax.device_get(_finite_leaves(params)), sep="/")
    names = sorted(name for name, is_finite in finite.items() if not is_finite)
    if not names:
        return _FINITE
    more = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} of {len(finite)} parameters not finite: {', '.join(names[:_NAMED])}{more}"


_FINITE = "all parameters finite"


@jax.jit
def _finite_leaves(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)), params)
