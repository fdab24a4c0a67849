"""Implementation of the core's ``Operations`` by the GPU kernels."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spec_t5x.contrib.gpu import kernels, layers, transposed
from spec_t5x.machine.accelerators import capability
from spec_t5x.machine.operations import FULL_PRECISION, XLA, Operations, Shapes, switch
from spec_t5x.models.weights import Form
from spec_t5x.types import Array, PyTree

log = logging.getLogger(__name__)

# Environment variable that enables the kernels if it is "1".
SWITCH = "SPEC_T5X_GPU_KERNELS"


class GpuOperations(Operations):
    """Operations by kernels, for models on an NVIDIA GPU that is the only device."""

    platform = "cuda"

    def usable(self, shapes: Shapes, dtype: str) -> bool:
        """Returns True if the kernels are used, and faster than XLA for matrices of these sizes.

        Logs once why the kernels are not used if they should be.
        """
        used, reason = self.state()
        if not used and switch(SWITCH) == "1":
            _say_unused(reason)
        return used and is_small(shapes)

    def pack(self, params: PyTree) -> PyTree:
        """Transposes the parameters' matrices."""
        return transposed.pack(params)

    def packed(self, name: str, param: Array) -> Array | Form:
        """Returns one parameter on the device, transposed if it is a matrix."""
        return transposed.packed(name, super().packed(name, param))

    def apply(self, module: nn.Module, weights: PyTree, *args, method: str) -> Any:
        """Calls a network's ``method``; kernels compute its layers."""
        is_full = FULL_PRECISION.usable({}, module.config.dtype)
        others = FULL_PRECISION if is_full else XLA
        with nn.intercept_methods(layers.intercept):
            return others.apply(module, weights, *args, method=method)

    def kernel(self, name: str, *arrays: Array) -> Callable | None:
        """Returns ``jnp.argmax`` for ``argmax``: half as many kernels as two reductions."""
        is_argmax = name == "argmax" and self.state()[0]
        return functools.partial(jnp.argmax, axis=-1) if is_argmax else None

    def state(self) -> tuple[bool, str]:
        """Returns True if the kernels are used, and the reason; compiles nothing."""
        if switch(SWITCH) != "1":
            return False, f"{SWITCH} is not 1"
        devices = jax.devices()
        if len(devices) > 1:
            return False, f"there are {len(devices)} devices"
        if (capability(devices[0]) or 0) < 8:
            return False, f"{devices[0].device_kind} is no NVIDIA GPU of compute capability 8.0"
        return True, f"{SWITCH} is 1"


def is_small(shapes: Shapes, most_inner: int = kernels.MOST_INNER) -> bool:
    """Returns True if no matrix of the parameters has more than ``most_inner`` rows."""
    inner = (shape[0] for path, shape in shapes.items() if path.endswith("/kernel"))
    return max(inner, default=0) <= most_inner


@functools.cache
def _say_unused(reason: str) -> None:
    log.warning("%s is 1, but XLA computes all layers: %s", SWITCH, reason)


GPU = GpuOperations()
