"""XLA's flags that matter for decoding, by platform, set before JAX starts.

* GPU: a decoder step is dozens of small operations, and launching each from the host takes
  longer than a T5-small step itself. XLA can record them into command buffers (CUDA graphs);
  the loops and branches around the steps only if asked to, which is done here: then a whole
  draft loop is one launch.
* CPU: none. XLA's products of few rows are slow whatever its flags; see ``cpu_kernels``.
* TPU: none. The loop compiles to one program without copies of caches (``spec-t5x
  compile-tpu`` shows what XLA makes of it).

``spec-t5x`` sets them itself. A program of one's own calls ``apply`` before JAX makes its first
array, or exports the variable: ``export XLA_FLAGS="$(python -m spec_t5x.xla_flags)"``.
"""

import os

FLAGS = {
    "gpu": ("--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL",),
    "cpu": (),
    "tpu": (),
}


def apply() -> None:
    """Adds the flags to ``XLA_FLAGS``; one that is there already stays as it is.

    Those of all platforms: which one JAX will use is not known before it starts, and flags
    of another have no effect.
    """
    os.environ["XLA_FLAGS"] = combined(os.environ.get("XLA_FLAGS", ""))


def combined(given: str) -> str:
    """``given`` and the flags that it does not name.

    >>> combined("--xla_gpu_enable_command_buffer=")
    '--xla_gpu_enable_command_buffer='
    """
    named = {flag.partition("=")[0] for flag in given.split()}
    ours = [flag for flags in FLAGS.values() for flag in flags]
    return " ".join([*given.split(), *(f for f in ours if f.partition("=")[0] not in named)])


if __name__ == "__main__":
    print(combined(os.environ.get("XLA_FLAGS", "")))
