"""The default type that networks compute in, by device.

A TPU or a GPU multiplies bfloat16 at twice the speed of float32 or more, and reads half the bytes.
On a CPU XLA's bfloat16 matrix products take about 20 times as long as float32's (1.7 against 33 GB
of weights a second, measured on two cores). For an NVIDIA GPU before Ampere, such as a T4, XLA
writes a float32 copy of every bfloat16 matrix in every call: 0.5 GB in a step of T5 base.
Float32 also makes speculative and plain text equal token for token; in bfloat16 two logits may tie.
"""

import functools
import logging
from typing import Any

from spec_t5x.errors import check_choice
from spec_t5x.machine.accelerators import is_old_gpu, unused
from spec_t5x.names import AUTO, DTYPES

log = logging.getLogger(__name__)


def resolve_dtype(dtype: str, device: Any = None) -> str:
    """Returns "float32" or "bfloat16": ``dtype``, or for "auto" the device's fast type.

    Logs a warning, once, for bfloat16 where it is slow; raises ``InputError`` for any other
    ``dtype``. ``device`` is JAX's; None takes its first one, which may start JAX.
    """
    check_choice("dtype", dtype, DTYPES)
    if dtype == "float32":
        return dtype
    if device is None:
        import jax

        device = jax.devices()[0]
        if device.platform == "cpu" and not jax.config.jax_platforms:
            _warn_of_unused()
    is_slow = device.platform == "cpu" or is_old_gpu(device)
    if dtype == AUTO:
        return "float32" if is_slow else "bfloat16"
    if is_slow:
        _warn_of_slowness(device.device_kind)
    return dtype


@functools.cache  # once in a process
def _warn_of_unused() -> None:
    if why := unused():
        log.warning("computing on the CPU: %s", why)


@functools.cache
def _warn_of_slowness(device_kind: str) -> None:
    log.warning(
        "bfloat16 is slower than float32 on this device (%s): leave --dtype out, or give float32",
        device_kind,
    )
