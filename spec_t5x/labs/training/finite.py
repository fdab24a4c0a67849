"""The check for parameters that are not finite numbers, which stops a run that diverges."""

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from spec_t5x.types import PyTree

# Most parameters that a message names.
_NAMED = 3
_FINITE = "all parameters finite"


class DivergedError(Exception):
    """The error of a run whose loss, gradient, parameters or measurement is not finite."""


def check_params(params: PyTree, step: int) -> None:
    """Raises ``DivergedError``, naming ``step``, if a parameter has a value that is not finite."""
    state = describe(params)
    if state != _FINITE:
        raise DivergedError(f"{state} after step {step}")


def describe(params: PyTree) -> str:
    """Returns a phrase that counts and names the parameters that are not finite, if any."""
    finite = flatten_dict(jax.device_get(_finite_leaves(params)), sep="/")
    names = sorted(name for name, is_finite in finite.items() if not is_finite)
    if not names:
        return _FINITE
    more = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} of {len(finite)} parameters not finite: {', '.join(names[:_NAMED])}{more}"


@jax.jit
def _finite_leaves(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)), params)
