"""Workarounds in the tests for differences of JAX 0.7."""

from typing import Any

import jax
import jaxtyping
from jax._src import api_util

if hasattr(jax, "enable_x64"):
    enable_x64 = jax.enable_x64
else:
    from jax.experimental import enable_x64  # noqa: F401


def leave_placeholders_unchecked() -> None:
    """Disables jaxtyping's checks while JAX 0.7 unflattens a structure of placeholders.

    JAX 0.7 uses an ``object()`` for each leaf; later versions do not build the structure.
    """
    placeholder = getattr(api_util, "SENTINEL", None)
    if placeholder is None:
        return
    unflatten = api_util.tree_unflatten

    def unflatten_unchecked(structure: Any, leaves: Any) -> Any:
        leaves = list(leaves)
        if not any(leaf is placeholder for leaf in leaves):
            return unflatten(structure, leaves)
        before = jaxtyping.config.jaxtyping_disable
        jaxtyping.config.update("jaxtyping_disable", True)
        try:
            return unflatten(structure, leaves)
        finally:
            jaxtyping.config.update("jaxtyping_disable", before)

    api_util.tree_unflatten = unflatten_unchecked
