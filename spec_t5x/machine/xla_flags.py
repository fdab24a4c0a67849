"""XLA's settings before JAX starts: what matters for decoding, and no libtpu without a TPU.

* GPU: a decoder step is dozens of small operations, and launching each from the host takes
  longer than a T5-small step itself. XLA can record them into command buffers (CUDA graphs);
  the loops and branches around the steps only if asked to, which is done here: then a whole
  draft loop is one launch.
* CPU: none. XLA's products of few rows are slow whatever its flags; see ``operations``.
* TPU: none. The loop compiles to one program without copies of caches (``spec-t5x
  compile-tpu`` shows what XLA makes of it).

JAX starts libtpu wherever it is installed, and on a machine without a TPU libtpu prints half a
dozen lines about what it does not find. There JAX is told that the platform is not available.

``spec-t5x`` sets them itself. Your own program calls ``apply`` before JAX makes its first
array, or exports the variable: ``export XLA_FLAGS="$(python -m spec_t5x.machine.xla_flags)"``.
"""

import importlib.util
import os

from spec_t5x.machine import accelerators

GPU_FLAG = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"

# Variables that importing JAX sets, TPU or none; others called TPU_… are somebody's who has one.
_SET_BY_JAX = {"TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"}


def apply() -> None:
    """Adds the flag to ``XLA_FLAGS``, and leaves libtpu alone where there is no TPU.

    If it is there already it stays as it is. Which platform JAX will use is not known before it
    starts; on another the flag has no effect.
    """
    os.environ["XLA_FLAGS"] = combined(os.environ.get("XLA_FLAGS", ""))
    if importlib.util.find_spec("libtpu") and not _tpu_is_likely():
        _leave_tpu_out()


def _tpu_is_likely() -> bool:
    """Whether this machine shows a TPU, or its environment names one."""
    named = {name for name in os.environ if name.startswith(("TPU_", "JAX_FORCE_TPU_"))}
    return accelerators.present() is accelerators.TPU or bool(named - _SET_BY_JAX)


def _leave_tpu_out() -> None:
    """JAX goes on to the next platform, unless it was told which ones to take.

    Told by ``JAX_PLATFORMS``, or by JAX, which looks for chips among the PCI devices.
    """
    import jax
    from jax.extend.backend import register_backend_factory

    def no_client():
        raise RuntimeError("this machine has no TPU: set JAX_PLATFORMS=tpu to try all the same")

    if jax.config.jax_platforms is None:
        # What JAX itself registers, libtpu's client aside.
        register_backend_factory("tpu", no_client, priority=300, fail_quietly=True)


def combined(given: str) -> str:
    """``given`` and the flag, where it does not name it.

    >>> combined("--xla_gpu_enable_command_buffer=")
    '--xla_gpu_enable_command_buffer='
    """
    flags = given.split()
    name = GPU_FLAG.partition("=")[0]
    is_named = any(flag.partition("=")[0] == name for flag in flags)
    return " ".join(flags if is_named else [*flags, GPU_FLAG])


if __name__ == "__main__":
    print(combined(os.environ.get("XLA_FLAGS", "")))
