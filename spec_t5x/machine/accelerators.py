"""Detection of this machine's GPU or TPU, and of the reason if JAX does not use it."""

import glob
import importlib.metadata
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from spec_t5x.machine.extras import version

# Plug-ins that JAX refuses unless their version is jaxlib's.
_CUDA_PLUGIN = re.compile(r"jax-(cuda\d+)-(plugin|pjrt)")
# The part of a version that must be equal: its numbers, without a suffix.
_NUMBERS = re.compile(r"\d+(\.\d+)*")


class Accelerator(NamedTuple):
    """Kind of accelerator: how to detect it, and how JAX names it."""

    name: str
    # Glob patterns of the accelerator's device files.
    files: tuple[str, ...]
    # JAX's names of the platform.
    platforms: tuple[str, ...]
    # The extra of the package ``jax`` that installs JAX's plug-in for the accelerator.
    extra: str


# TPUs from v2 to v4 have files of the first pattern.
TPU = Accelerator("TPU", ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"), ("tpu",), "tpu")
GPU = Accelerator(
    "NVIDIA GPU", ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/dxg"), ("gpu", "cuda"), "cuda12"
)


def present() -> Accelerator | None:
    """Returns the accelerator whose device files exist, a TPU before a GPU; None if none do."""
    return next(_all_present(), None)


def _all_present() -> Iterator[Accelerator]:
    return (each for each in (TPU, GPU) if any(map(glob.glob, each.files)))


def unused() -> str | None:
    """Returns why JAX leaves an accelerator of this machine unused, and the remedy; None if none.

    An installed CUDA plug-in that does not fit jaxlib is reported even without an accelerator.
    """
    for plugin, extra in _plugins():
        ours, jaxlib = version(plugin), version("jaxlib")
        if _NUMBERS.match(ours)[0] != _NUMBERS.match(jaxlib)[0]:
            return f"{plugin} is {ours} and jaxlib {jaxlib}: {_install(extra)}"
    # A virtual machine's host may have a TPU's files, of VFIO, beside its GPU.
    if not (all_found := list(_all_present())):
        return None
    import jax

    if any(jax.default_backend() in each.platforms for each in all_found):
        return None
    found = all_found[0]
    return f"JAX does not see the {found.name}: {_remedy(found)}"


def fault_of(error: Exception) -> str | None:
    """Returns reason and remedy if JAX has no such platform or cannot start it; None for others."""
    reason = str(error).partition("\n")[0]
    if reason.startswith("Unknown backend"):
        return f"{reason}: set JAX_DEFAULT_DEVICE to one of these, or unset it"
    if "Unable to initialize backend" not in str(error):
        return None
    # Omits JAX's remedies, which would select the CPU.
    reason = re.sub(r"\.? \((set|you) .*", "", reason)
    found = present()
    return f"{reason}: {_remedy(found) if found else 'set JAX_PLATFORMS=cpu'}"


def capability(device: Any) -> int | None:
    """Returns the major number of an NVIDIA GPU's compute capability; None for other devices.

    A P100 has 6, V100 and T4 7, an A100 (Ampere) 8, an H100 9.
    """
    found = re.fullmatch(r"(\d+)\.\d+", getattr(device, "compute_capability", ""))
    return int(found[1]) if found else None


def is_old_gpu(device: Any) -> bool:
    """Tells whether a device is an NVIDIA GPU before Ampere, without bfloat16 and XLA's Triton."""
    return (capability(device) or 8) < 8


def _remedy(accelerator: Accelerator) -> str:
    chosen = os.environ.get("JAX_PLATFORMS")
    if chosen and not set(chosen.split(",")) & set(accelerator.platforms):
        return f"JAX_PLATFORMS is {chosen!r}, unset it"
    if accelerator is GPU:
        plugin = next((name for name, _ in _plugins()), None)
        failing = f"{plugin} does not start, see whether nvidia-smi finds the driver"
    else:
        plugin = version("libtpu")
        failing = "libtpu does not start, end the other processes that hold the TPU"
    return f"{failing}, and restart Python" if plugin else _install(accelerator.extra)


def _install(extra: str) -> str:
    return f"pip install 'jax[{extra}]=={version('jax')}', and restart Python"


def _plugins() -> Iterator[tuple[str, str]]:
    """Yields each installed CUDA plug-in of JAX with the extra of JAX that installs it."""
    names = {each.metadata["Name"] or "" for each in importlib.metadata.distributions()}
    for name in sorted(names, reverse=True):
        if match := _CUDA_PLUGIN.fullmatch(name.lower().replace("_", "-")):
            yield match[0], match[1]


def main() -> None:
    """Prints JAX's devices and, if JAX leaves an accelerator unused, the reason."""
    from spec_t5x.machine import xla_flags

    xla_flags.apply()
    import jax

    print(f"jax.devices() is {jax.devices()}")
    if why := unused():
        print(why)


if __name__ == "__main__":
    main()
