"""TPUs that are not there: chips, their figures, and devices to compile for.

libtpu, which PyPI has, compiles for a TPU on any Linux machine. ``topology`` asks it for
the devices of a slice; nothing can be run on them.
"""

import dataclasses
import importlib.util
import os

import jax
from jax.experimental import topologies

from spec_t5x.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What one chip can do at most."""

    name: str
    # Operations per second in bfloat16.
    flops: float
    # Bytes per second from and to its memory.
    memory_bandwidth: float
    # Bytes of memory.
    memory: int
    # Bytes per second over one link to a neighbour, in one direction.
    link_bandwidth: float
    # How libtpu is to see it.
    config: str


CHIPS = {
    # cloud.google.com/tpu/docs/v4; links: Jouppi et al. (ISCA 2023), Table 4. "megacore"
    # makes one device of a chip's two cores.
    "v4": Chip(
        name="v4",
        flops=275e12,
        memory_bandwidth=1.2e12,
        memory=32 * 2**30,
        link_bandwidth=50e9,
        config="megacore",
    ),
}

# So that libtpu starts on a machine that is no TPU VM without looking for one.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Compiling takes no TPU away from another process.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def prepare_environment() -> None:
    """Sets what libtpu and JAX read when they start; what the user set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # A TPU or GPU of this machine is left alone, also if JAX was imported before.
    jax.config.update("jax_platforms", "cpu")


def topology(name: str) -> tuple[Chip, list[jax.Device]]:
    """The chip and the devices of a slice such as ``v4:2x2x1`` (a v4-8: 4 chips).

    Raises:
      InputError: libtpu is not installed, or there is no such slice.
    """
    kind, _, layout = name.partition(":")
    if kind not in CHIPS or not layout:
        known = ", ".join(f"{chip}:2x2x1" for chip in CHIPS)
        raise InputError(f"topology {name!r}: give a chip and a layout, such as {known}")
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"topology {name!r} needs libtpu, which is not installed: pip install "
            "'spec_t5x[tpu-compile]' (Linux)"
        )
    chip = CHIPS[kind]
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=name, chip_config_name=chip.config
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"topology {name!r}: libtpu says {reason!r}: give a layout such as {kind}:2x2x1"
        ) from error
    return chip, list(description.devices)
