"""Implementation of the core's ``Operations`` by the GPU kernels."""

import functools
import importlib.util
import logging
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import lax

from spec_t5x.contrib.gpu import layers, transposed
from spec_t5x.contrib.gpu.kernels import SWITCH
from spec_t5x.machine.accelerators import capability
from spec_t5x.machine.operations import FULL_PRECISION, XLA, Operations, Shapes, switch
from spec_t5x.models.weights import Form, Rounded, map_forms
from spec_t5x.types import Array, PyTree

log = logging.getLogger(__name__)

# Ends of the paths of a layer's maps: queries, keys, values, outputs, and the feed-forward block.
_MAPS = ("/query/kernel", "/key/kernel", "/value/kernel", "/out/kernel")
_MAPS += ("/wi/kernel", "/wi_0/kernel", "/wi_1/kernel", "/wo/kernel")

# Most elements of a layer's matrix by default, those of T5-small and the packaged T5. No step of
# T5 1.1 base was compared, and eight tokens of large, one by one, took longer than by XLA.
MOST_ELEMENTS = 1 << 20
# Most rows of a matrix with ``SWITCH``, those of T5 1.1 large. XL was not compared.
MOST_INNER = 3072


class GpuOperations(Operations):
    """Operations by kernels, for models on an NVIDIA GPU that is the only device.

    Without ``SWITCH``, only what a GPU has tested is enabled: one row of a T5 in bfloat16 with
    matrices of at most ``MOST_ELEMENTS``, on an H100 or H200.
    """

    platform = "cuda"

    def usable(self, shapes: Shapes, dtype: str) -> bool:
        """Returns True if the kernels are used, and faster than XLA for matrices of these sizes.

        Logs once why the kernels are not used if they should be.
        """
        used, reason = self.state()
        if switch(SWITCH) == "1":
            if not used:
                _say_unused(reason)
            return used and is_small(shapes, MOST_INNER)
        is_t5 = any(path.endswith("relpos_bias/rel_embedding") for path in shapes)
        maps = (math.prod(shape) for path, shape in shapes.items() if path.endswith(_MAPS))
        fits = max(maps, default=0) <= MOST_ELEMENTS
        return used and is_t5 and fits and dtype == "bfloat16"

    def suit(self, params: PyTree, dtype: str) -> bool:
        """Tells whether a model of ``dtype`` with these parameters can use the operations."""
        # A rounded matrix has the shape of its values.
        params = map_forms(lambda form: form.values if isinstance(form, Rounded) else form, params)
        flat = flatten_dict(params, sep="/").items()
        maps = [getattr(leaf, "values", leaf) for path, leaf in flat if path.endswith(_MAPS)]
        # Maps of a training are in float32.
        is_training = any(values.dtype == jnp.float32 for values in maps)
        return super().suit(params, "float32" if is_training else dtype)

    def pack(self, params: PyTree) -> PyTree:
        """Transposes the parameters' matrices."""
        return transposed.pack(params)

    def packed(self, name: str, param: Array) -> Array | Form:
        """Returns one parameter on the device, transposed if it is a matrix."""
        return transposed.packed(name, super().packed(name, param))

    def apply(self, module: nn.Module, weights: PyTree, *args, method: str | Callable) -> Any:
        """Calls a network's ``method``; kernels compute its layers."""
        is_full = FULL_PRECISION.usable({}, module.config.dtype)
        others = FULL_PRECISION if is_full else XLA
        with nn.intercept_methods(layers.intercept):
            return others.apply(module, weights, *args, method=method)

    def kernel(self, name: str, *arrays: Array) -> Callable | None:
        """Returns XLA's argmax for ``argmax``: half as many kernels as two reductions."""
        is_argmax = name == "argmax" and self.state()[0]
        return _argmax if is_argmax else None

    def state(self) -> tuple[bool, str]:
        """Returns True if the kernels are used, and the reason; compiles nothing."""
        if switch(SWITCH) == "0":
            return False, f"{SWITCH} is 0"
        devices = jax.devices()
        if len(devices) > 1:
            return False, f"there are {len(devices)} devices"
        if jax.config.jax_default_device is not None:
            return False, f"jax_default_device is {jax.config.jax_default_device}"
        found, kind = capability(devices[0]) or 0, devices[0].device_kind
        if found < 8:
            return False, f"{kind} is no NVIDIA GPU of compute capability 8.0"
        if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
            return False, f"JAX {jax.__version__} has no Pallas on Triton"
        if switch(SWITCH) == "1":
            return True, f"{SWITCH} is 1"
        if found != 9:
            return False, f"they were tested on an H100 and an H200; try {SWITCH}=1"
        return True, f"for one row; for more, try {SWITCH}=1"

    def __repr__(self) -> str:
        # Costs and outputs of one setting are not those of another.
        return f"{super().__repr__()}({switch(SWITCH) or ''})"


def _argmax(values: Array) -> Array:
    return lax.argmax(values, values.ndim - 1, jnp.int32)


def is_small(shapes: Shapes, most_inner: int) -> bool:
    """Returns True if no matrix of the parameters has more than ``most_inner`` rows."""
    inner = (shape[0] for path, shape in shapes.items() if path.endswith("/kernel"))
    return max(inner, default=0) <= most_inner


@functools.cache
def _say_unused(reason: str) -> None:
    log.warning("%s is 1, but XLA computes all layers: %s", SWITCH, reason)


GPU = GpuOperations()
