"""The GPU or TPU of this machine, and reasons for which JAX does not use it."""

import glob
import importlib.metadata
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from spec_t5x.machine.versions import version

# Plug-ins that JAX refuses unless their version is jaxlib's.
_CUDA_PLUGIN = re.compile(r"jax-(cuda\d+)-(plugin|pjrt)")
# The part of a version that JAX compares.
_NUMBERS = re.compile(r"\d+(\.\d+)*")


class Accelerator(NamedTuple):
    """A kind of accelerator."""

    name: str
    # Patterns of its device files.
    files: tuple[str, ...]
    # JAX's names of its platform.
    platforms: tuple[str, ...]
    # The extra of JAX that installs its plug-in.
    extra: str


# The TPU's first pattern is of v2 to v4.
TPU = Accelerator("TPU", ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"), ("tpu",), "tpu")
GPU = Accelerator(
    "NVIDIA GPU", ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/dxg"), ("gpu", "cuda"), "cuda12"
)


def present() -> Accelerator | None:
    """Returns the accelerator whose device files this machine has, a TPU first; None without."""
    return next((each for each in (TPU, GPU) if any(map(glob.glob, each.files))), None)


def unused() -> str | None:
    """Returns the reason why JAX does not use this machine's accelerator, with the remedy, or None.

    A plug-in that JAX refuses is a reason on any machine.
    """
    for plugin, extra in _plugins():
        ours, jaxlib = version(plugin), version("jaxlib")
        if _NUMBERS.match(ours)[0] != _NUMBERS.match(jaxlib)[0]:
            return f"{plugin} is {ours} and jaxlib {jaxlib}: {_install(extra)}"
    found = present()
    if found is None or _platform() in found.platforms:
        return None
    return f"JAX does not see the {found.name}: {_remedy(found)}"


def _platform() -> str:
    import jax

    return jax.default_backend()


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
