"""The default type that networks compute in, by platform.

A TPU or a GPU multiplies bfloat16 at twice the speed of float32 or more, and reads half the bytes.
On a CPU XLA's bfloat16 matrix products take about 20 times as long as float32's (1.7 against 33 GB
of weights a second, measured on two cores). Float32 also makes speculative and plain text equal
token for token; in bfloat16 two logits may tie.
"""

import functools
import logging

from spec_t5x.errors import check_choice
from spec_t5x.names import AUTO

log = logging.getLogger(__name__)

DTYPES = (AUTO, "float32", "bfloat16")


def resolve_dtype(dtype: str, platform: str | None = None) -> str:
    """Returns "float32" or "bfloat16": ``dtype``, or for "auto" the platform's fast type.

    Logs a warning, once, for bfloat16 on a CPU; raises ``InputError`` for any other ``dtype``.
    ``platform`` is "cpu", "gpu" or "tpu"; None takes JAX's default backend, which may start JAX.

    >>> [resolve_dtype("auto", platform) for platform in ("cpu", "gpu", "tpu")]
    ['float32', 'bfloat16', 'bfloat16']
    """
    check_choice("dtype", dtype, DTYPES)
    if dtype == "float32":
        return dtype
    if platform is None:
        import jax

        platform = jax.default_backend()
    if dtype == AUTO:
        return "float32" if platform == "cpu" else "bfloat16"
    if platform == "cpu":
        _warn_of_slowness()
    return dtype


@functools.cache  # once in a process
def _warn_of_slowness() -> None:
    log.warning(
        "bfloat16 on a CPU is about 20 times slower than float32 (XLA): leave --dtype out, or give "
        "float32"
    )
