"""The default type that networks compute in, by device.

A TPU or a GPU multiplies bfloat16 at twice the speed of float32 or more, and reads half the bytes.
On a CPU XLA's bfloat16 matrix products take about 20 times as long as float32's (1.7 against 33 GB
of weights a second, measured on two cores). For an NVIDIA GPU before Ampere, such as a T4, XLA
writes a float32 copy of every bfloat16 matrix in every call: 0.5 GB in a step of T5 base.
Float32 also makes speculative and plain text equal token for token; in bfloat16 two logits may tie.
"""

import functools
import logging

from spec_t5x.errors import check_choice
from spec_t5x.machine.accelerators import is_old_gpu, unused
from spec_t5x.names import AUTO, DTYPES

# Warnings are logged once in a process.
_warn = functools.cache(logging.getLogger(__name__).warning)
_unused = functools.cache(unused)


def resolve_dtype(dtype: str) -> str:
    """Returns "float32" or "bfloat16": ``dtype``, or for "auto" the fast type of JAX's device.

    Logs a warning, once, for bfloat16 where it is slow; raises ``InputError`` for any other
    ``dtype``. Starts JAX, unless ``dtype`` is "float32".
    """
    check_choice("dtype", dtype, DTYPES)
    if dtype == "float32":
        return dtype
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu" and not jax.config.jax_platforms and (why := _unused()):
        _warn(f"computing on the CPU: {why}")
    is_slow = device.platform == "cpu" or is_old_gpu(device)
    if dtype == AUTO:
        return "float32" if is_slow else "bfloat16"
    if is_slow:
        _warn(
            f"bfloat16 is slower than float32 on this device ({device.device_kind}): leave --dtype "
            "out, or give float32"
        )
    return dtype
