"""XLA's settings before JAX starts: a flag for GPUs, and no libtpu on a machine without a TPU.

On a GPU, launching each of a decoder step's dozens of small operations from the host takes longer
than a T5-small step itself. XLA records operations into command buffers (CUDA graphs), and with
this flag the loops and branches around them too: then a whole draft loop is one launch. Decoding
needs no flag on a CPU or TPU.

JAX starts libtpu if it is installed, and without a TPU libtpu prints half a dozen lines.

``spec-t5x`` calls ``apply`` itself. Your own program calls it before JAX makes its first
array, or exports the variable: ``export XLA_FLAGS="$(python -m spec_t5x.machine.xla_flags)"``.
"""

import importlib.util
import os

from spec_t5x.machine import accelerators

GPU_FLAG = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"

# Variables that importing JAX sets on any machine; the user of a TPU sets others called TPU_….
_SET_BY_JAX = {"TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"}


def apply() -> None:
    """Adds the flag to ``XLA_FLAGS`` unless it is set, and disables libtpu if there is no TPU.

    JAX chooses its platform later; the flag has no effect on others than GPUs.
    """
    os.environ["XLA_FLAGS"] = combined(os.environ.get("XLA_FLAGS", ""))
    if importlib.util.find_spec("libtpu") and not _tpu_is_likely():
        _disable_tpu()


def _tpu_is_likely() -> bool:
    """Tells whether this machine has a TPU, or its environment names one."""
    named = {name for name in os.environ if name.startswith(("TPU_", "JAX_FORCE_TPU_"))}
    return accelerators.present() is accelerators.TPU or bool(named - _SET_BY_JAX)


def _disable_tpu() -> None:
    """Makes JAX try the next platform, unless the user or JAX itself chose some."""
    import jax
    from jax.extend.backend import register_backend_factory

    def no_client():
        raise RuntimeError("this machine has no TPU: set JAX_PLATFORMS=tpu to try all the same")

    if jax.config.jax_platforms is None:
        # The arguments are JAX's own, except libtpu's client.
        register_backend_factory("tpu", no_client, priority=300, fail_quietly=True)


def combined(given: str) -> str:
    """Returns ``given`` with the flag appended unless it names the flag.

    >>> combined("--xla_gpu_enable_command_buffer=")
    '--xla_gpu_enable_command_buffer='
    """
    flags = given.split()
    name = GPU_FLAG.partition("=")[0]
    is_named = any(flag.partition("=")[0] == name for flag in flags)
    return " ".join(flags if is_named else [*flags, GPU_FLAG])


if __name__ == "__main__":
    print(combined(os.environ.get("XLA_FLAGS", "")))
