"""The operations that this machine computes with: XLA's, or those of a folder of ``contrib``.

Models and the functions of ``sampling`` are written in JAX alone. Kernels that replace them are
one object, which is registered by its name:

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
    """XLA's operations: models and functions as they are written. A subclass has kernels."""

    # Platform of the kernels, by JAX's name; None for all.
    platform: ClassVar[str | None] = None
    # Whether ``first`` saves time.
    skips: ClassVar[bool] = False

    def usable(self, dtype: str) -> bool:
        """Tells whether models of this type use the operations, if all is on one device."""
        return True

    def suit(self, params: PyTree, dtype: str) -> bool:
        """Tells whether a model with these very parameters can use the operations."""
        return True

    def pack(self, params: PyTree) -> PyTree:
        """Packs parameters for the kernels; some may become a ``models.weights.Form``."""
        return params

    def packed(self, name: str, param: Array) -> Any:
        """Packs one parameter, on the host or on a device, by the last part of its path."""
        return jax.device_put(param)

    def first(self, model: PyTree, num: Int[Array, ""]) -> PyTree:
        """Returns the model, which may skip all but the first ``num`` tokens of each row."""
        return model

    def apply(self, module: nn.Module, weights: PyTree, *args, method: str) -> Any:
        """Calls a method of a network with packed weights."""
        return module.apply({"params": weights}, *args, method=method)

    def kernel(self, name: str, *arrays: Array) -> Callable | None:
        """Returns a kernel for the function of this name in ``sampling``; None for none."""
        return None

    def state(self) -> tuple[bool, str] | None:
        """Tells whether kernels are used, and why or why not; None if there are none.

        Nothing is compiled.
        """
        return None

    def __repr__(self) -> str:
        # Without an address: measured costs are stored under a description with it.
        return type(self).__name__


XLA = Operations()


def registered() -> tuple[Operations, ...]:
    """Returns the operations of this installation, XLA's last."""
    return (*registry.find_all("operations").values(), XLA)


def usable(dtype: str) -> Operations:
    """Returns the first operations that models of this type use."""
    return next(each for each in registered() if each.usable(dtype))


def pack(params: PyTree, dtype: str) -> tuple[PyTree, Operations]:
    """Packs a model's parameters for the first operations that suit them; returns both."""
    params = jax.tree.map(jnp.asarray, params)
    chosen = next(each for each in registered() if each.suit(params, dtype))
    return chosen.pack(params), chosen


def by_kernel(function: Callable) -> Callable:
    """Runs a function of arrays as this machine's kernel, if there is one for them.

    Arguments by name are options.
    """

    @functools.wraps(function)
    def call(*arrays: Array, **options) -> Array:
        found = ((each, each.kernel(function.__name__, *arrays)) for each in registered())
        operations, kernel = next((pair for pair in found if pair[1] is not None), (XLA, None))
        if kernel is None:
            return function(*arrays, **options)
        kernel, plain = (functools.partial(each, **options) for each in (kernel, function))
        # A process on a CPU may compile for a TPU, too.
        return jax.lax.platform_dependent(*arrays, default=plain, **{operations.platform: kernel})

    return call
