"""Operations that models compute with: XLA's, or kernels of a folder of ``contrib``.

Models and the functions of ``sampling`` are written in JAX alone. Kernels that replace parts of
them are one ``Operations`` object, which is registered under a name:

    register("operations", fast="spec_t5x.contrib.fast.operations:FAST")
"""

import contextvars
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from spec_t5x import registry
from spec_t5x.errors import InputError
from spec_t5x.types import Array, Int, PyTree

# Shapes of a model's parameters by their paths (``encoder/encoder_norm/scale``).
Shapes = Mapping[str, tuple[int, ...]]


class Operations:
    """XLA's operations, which run models and functions as written; subclasses bring kernels."""

    # JAX's name of the platform that the kernels are for; None for all platforms.
    platform: ClassVar[str | None] = None
    # Whether ``first`` skips tokens, and so saves time.
    skips: ClassVar[bool] = False

    def usable(self, shapes: Shapes, dtype: str) -> bool:
        """Tells whether a model of ``dtype`` and these shapes can use them, if not sharded."""
        return True

    def suit(self, params: PyTree, dtype: str) -> bool:
        """Tells whether a model of ``dtype`` with these parameters can use the operations."""
        flat = flatten_dict(params, sep="/")
        # Forms without a shape are multiplied by XLA.
        shapes = {path: leaf.shape for path, leaf in flat.items() if hasattr(leaf, "shape")}
        return self.usable(shapes, dtype)

    def pack(self, params: PyTree) -> PyTree:
        """Returns the parameters as kernels need them; some may be ``models.weights.Form``."""
        return params

    def packed(self, name: str, param: Array) -> Any:
        """Returns a host or device array as kernels need it; ``name`` ends the parameter's path."""
        return param if isinstance(param, jax.Array) else jax.device_put(param)

    def first(self, model: PyTree, num: Int[Array, ""]) -> PyTree:
        """Returns a model that may compute only the first ``num`` tokens of each row."""
        return model

    def apply(self, module: nn.Module, weights: PyTree, *args, method: str | Callable) -> Any:
        """Calls a network's method, or a function of it, with weights from ``pack``."""
        return module.apply({"params": weights}, *args, method=method)

    def kernel(self, name: str, *arrays: Array) -> Callable | None:
        """Returns a kernel for ``sampling``'s function ``name`` and these arrays, or None."""
        return None

    def state(self) -> tuple[bool, str] | None:
        """Says whether kernels are used, and why, without compiling any; None for XLA's."""
        return None

    def __repr__(self) -> str:
        # No address, which would vary: the key of stored costs contains this text.
        return type(self).__name__


class FullPrecision(Operations):
    """XLA's operations, with the products of a float32 model in float32 on a GPU or TPU, too.

    JAX's default there is TF32 or bfloat16, in which two logits may tie. A
    ``jax_default_matmul_precision`` that the user has set is kept.
    """

    def usable(self, shapes: Shapes, dtype: str) -> bool:
        """Returns True for float32 on a GPU or TPU, unless the user has set a precision."""
        is_set = jax.config.jax_default_matmul_precision is not None
        return dtype == "float32" and not is_set and jax.default_backend() != "cpu"

    def apply(self, module: nn.Module, weights: PyTree, *args, method: str | Callable) -> Any:
        """Calls a network's method, or a function of it, with products in full precision."""
        with jax.default_matmul_precision("highest"):
            return super().apply(module, weights, *args, method=method)


XLA, FULL_PRECISION = Operations(), FullPrecision()
# Whether models may use registered operations and fixed layouts; JAX exports neither.
KERNELS = contextvars.ContextVar("KERNELS", default=True)


def switch(name: str) -> str | None:
    """Returns an environment variable that is "1" or "0"; None if it is empty or not set.

    Raises ``InputError`` if the variable is anything else.
    """
    value = os.environ.get(name) or None
    if value not in (None, "0", "1"):
        raise InputError(f"{name} is {value!r}: set it to 1 or 0, or unset it")
    return value


def registered() -> tuple[Operations, ...]:
    """Returns all registered operations; XLA's are last."""
    kernels = registry.find_all("operations").values() if KERNELS.get() else ()
    return (*kernels, FULL_PRECISION, XLA)


def usable(shapes: Shapes, dtype: str) -> Operations:
    """Returns the first registered operations that a model of this type and shapes can use."""
    return next(each for each in registered() if each.usable(shapes, dtype))


def pack(params: PyTree, dtype: str) -> tuple[PyTree, Operations]:
    """Returns the parameters, packed for the first operations that suit, and the operations."""
    params = jax.tree.map(jnp.asarray, params)
    chosen = next(each for each in registered() if each.suit(params, dtype))
    return chosen.pack(params), chosen


def by_kernel(function: Callable) -> Callable:
    """Decorates a function of arrays so that a registered kernel of its name replaces it.

    Positional arguments are arrays, keyword arguments options. Other platforms run the function.
    """

    @functools.wraps(function)
    def call(*arrays: Array, **options) -> Array:
        plain = functools.partial(function, **options)
        for operations in registered():
            kernel = operations.kernel(function.__name__, *arrays)
            if kernel is not None:
                # A process on a CPU may compile for a TPU, too.
                on_its_own = {operations.platform: functools.partial(kernel, **options)}
                return jax.lax.platform_dependent(*arrays, default=plain, **on_its_own)
        return plain(*arrays)

    return call
