"""The operations that this machine computes with: XLA's, or those of a folder of ``contrib``.

Models and the functions of ``sampling`` are written in JAX alone. Kernels that a machine has in
their place are one object, which is registered by its name:

    register("operations", fast="spec_t5x.contrib.fast.operations:FAST")
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from spec_t5x import registry
from spec_t5x.types import Array, Int, PyTree


class Operations:
    """XLA's: models and functions as they are written. A subclass has kernels."""

    # The platform that they are for, as JAX calls it; None for all.
    platform: ClassVar[str | None] = None
    # Whether ``first`` saves time.
    skips: ClassVar[bool] = False

    def usable(self, dtype: str) -> bool:
        """Tells whether models that compute in this type use them, if all lies on one device."""
        return True

    def suit(self, params: PyTree, dtype: str) -> bool:
        """Tells whether a model with these very parameters can use them."""
        return True

    def pack(self, params: PyTree) -> PyTree:
        """Parameters as they read them, some of which may be of a ``models.weights.Form``."""
        return params

    def packed(self, name: str, param: Array) -> Any:
        """``pack`` of one parameter, on the host or on a device, by the last part of its path."""
        return jax.device_put(param)

    def first(self, model: PyTree, num: Int[Array, ""]) -> PyTree:
        """The model, which may leave out all but the first ``num`` tokens of each row."""
        return model

    def apply(self, module: nn.Module, weights: PyTree, *args, method: str) -> Any:
        """A method of a network, with packed weights."""
        return module.apply({"params": weights}, *args, method=method)

    def kernel(self, name: str, *arrays: Array) -> Callable | None:
        """A function that gives what the one of this name in ``sampling`` does; None for none."""
        return None

    def state(self) -> tuple[bool, str] | None:
        """Tells whether kernels are used, and why or why not; None if there are none.

        Nothing is compiled.
        """
        return None

    def __repr__(self) -> str:
        # Without an address: programs are kept under what describes them.
        return type(self).__name__


XLA = Operations()


def registered() -> tuple[Operations, ...]:
    """Those that this installation has, XLA's last."""
    return (*registry.find_all("operations").values(), XLA)


def usable(dtype: str) -> Operations:
    """The first that models of this type use."""
    return next(each for each in registered() if each.usable(dtype))


def pack(params: PyTree, dtype: str) -> tuple[PyTree, Operations]:
    """Parameters of a model as the first operations that suit them read them; and these."""
    params = jax.tree.map(jnp.asarray, params)
    chosen = next(each for each in registered() if each.suit(params, dtype))
    return chosen.pack(params), chosen


def by_kernel(function: Callable) -> Callable:
    """A function of arrays that runs as this machine's kernel where there is one for them.

    Arguments by name are options.
    """

    @functools.wraps(function)
    def call(*arrays: Array, **options) -> Array:
        for operations in registered():
            kernel = operations.kernel(function.__name__, *arrays)
            if kernel is not None:
                break
        else:
            return function(*arrays, **options)
        kernel, plain = (functools.partial(each, **options) for each in (kernel, function))
        # Also a process on a CPU may compile for a TPU.
        return jax.lax.platform_dependent(*arrays, default=plain, **{operations.platform: kernel})

    return call
