"""Chips of TPUs, and devices to compile for without hardware.

libtpu compiles for a TPU on any Linux machine. ``topology`` gets the devices of a slice from
libtpu; nothing can run on them.
"""

import contextlib
import importlib.metadata
import os
from typing import NamedTuple

import jax
from jax.experimental import topologies

from spec_t5x.errors import InputError
from spec_t5x.labs.requirements import requirements, unmet
from spec_t5x.machine.extras import EXTRAS, version


class Chip(NamedTuple):
    """Peak rates and memory of one chip."""

    # Operations per second in bfloat16.
    flops: float
    # Bytes per second between chip and memory.
    memory_bandwidth: float
    # Bytes of memory.
    memory: int
    # Bytes per second over one link to a neighbour, in one direction.
    link_bandwidth: float
    # libtpu's configuration; "megacore" makes one device of a chip's two cores.
    config: str


# From cloud.google.com/tpu/docs/v4, /v5e (1600 Gbit/s over four links), /v5p (4800 Gbit/s over six)
# and /v6e (800 GB/s in both directions over four); links of v4: Jouppi et al. (ISCA 2023), Table 4.
CHIPS = {
    "v4": Chip(275e12, 1.2e12, 32 * 2**30, 50e9, "megacore"),
    "v5e": Chip(197e12, 819e9, 16 * 2**30, 50e9, "default"),
    "v5p": Chip(459e12, 2765e9, 95 * 2**30, 100e9, "megacore"),
    "v6e": Chip(918e12, 1600e9, 32 * 2**30, 100e9, "default"),
}

# With these variables libtpu starts on any machine, without asking for a TPU VM's metadata.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Compiling takes no TPU from another process.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def prepare_environment() -> None:
    """Sets libtpu's variables that the user has not set, and restricts JAX to the CPU."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # JAX_PLATFORMS is read at JAX's import, which may be past.
    jax.config.update("jax_platforms", "cpu")


def no_compiler() -> str | None:
    """Returns why nothing can be compiled for a TPU here, with the remedy, or None."""
    if version("libtpu") is None:
        return f"libtpu is not installed: {EXTRAS['libtpu'].remedy} (Linux)"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in requirements([EXTRAS["libtpu"].name]):
            # JAX 0.7 crashes with libtpu 0.0.21, which Colab's TPUs run on.
            if requirement.name == "libtpu" and (reason := unmet(requirement)):
                return f"{reason} in an environment without a TPU"
    return None


def topology(name: str) -> tuple[Chip, list[jax.Device]]:
    """Returns the chip and the devices of a slice by name: ``v4:2x2x1`` is a v4-8 of 4 chips.

    Raises:
      InputError: libtpu is not installed or too old, or does not know the slice.
    """
    kind, _, layout = name.partition(":")
    if kind not in CHIPS or not layout:
        raise InputError(
            f"topology {name!r}: give a chip ({', '.join(CHIPS)}) and a layout, such as v5p:2x2x1 "
            "or v6e:2x2"
        )
    if reason := no_compiler():
        raise InputError(f"topology {name!r}: {reason}")
    chip = CHIPS[kind]
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=name, chip_config_name=chip.config
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"topology {name!r}: libtpu says {reason!r}: give another layout of {kind}"
        ) from error
    return chip, list(description.devices)
