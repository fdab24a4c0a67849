"""XLA's settings before JAX starts: a flag for GPUs, and no libtpu on a machine without a TPU.

Launching each of a decoder step's 200 small kernels from a GPU's host takes longer than T5-small's
step. XLA records kernels into command buffers (CUDA graphs), and with ``GPU_FLAG`` also the loops
and branches around them: a row's decoding is one launch (``benchmarks/gpu_launches.py``).
JAX starts libtpu if it is installed, and without a TPU libtpu prints half a dozen lines.

``spec-t5x`` calls ``apply`` itself. Other programs call ``apply`` before JAX makes its first
array, or export the variable: ``export XLA_FLAGS="$(python -m spec_t5x.machine.xla_flags)"``.
"""

import importlib.util
import os

from spec_t5x.machine import accelerators

GPU_FLAG = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"

# Variables that importing JAX sets on any machine; the user of a TPU sets others called TPU_….
_SET_BY_JAX = {"TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"}


def apply() -> None:
    """Adds ``GPU_FLAG`` to ``XLA_FLAGS``, and disables libtpu if there is no TPU.

    A value of the flag that is already set is kept. The flag affects GPUs only.
    """
    os.environ["XLA_FLAGS"] = combined(os.environ.get("XLA_FLAGS", ""))
    if importlib.util.find_spec("libtpu") and not _tpu_is_likely():
        _disable_tpu()


def _tpu_is_likely() -> bool:
    """Tells whether this machine has a TPU, or its environment has variables of TPUs."""
    named = {name for name in os.environ if name.startswith(("TPU_", "JAX_FORCE_TPU_"))}
    return accelerators.present() is accelerators.TPU or bool(named - _SET_BY_JAX)


def _disable_tpu() -> None:
    """Makes JAX skip the TPU and try the next platform, unless ``jax_platforms`` is set."""
    import jax
    from jax.extend.backend import register_backend_factory

    def no_client():
        raise RuntimeError("this machine has no TPU: set JAX_PLATFORMS=tpu to try it all the same")

    if jax.config.jax_platforms is None:
        # The arguments are JAX's own, except libtpu's client.
        register_backend_factory("tpu", no_client, priority=300, fail_quietly=True)


def combined(given: str) -> str:
    """Returns the flags ``given``, with ``GPU_FLAG`` appended unless it is among them.

    >>> combined("--xla_gpu_enable_command_buffer=")
    '--xla_gpu_enable_command_buffer='
    """
    name = GPU_FLAG.partition("=")[0]
    is_named = any(flag.partition("=")[0] == name for flag in given.split())
    # XLA reads a value without a dash as the name of a file, which nothing can be added to.
    is_file = given.strip() and not given.lstrip().startswith("-")
    return given if is_named or is_file else f"{given} {GPU_FLAG}".lstrip()


if __name__ == "__main__":
    print(combined(os.environ.get("XLA_FLAGS", "")))
