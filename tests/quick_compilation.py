"""Options for the fastest compilation, for programs that run only briefly.

JAX's setting ``jax_disable_most_optimizations`` leaves fusion emitters and the splitting of
programs into parts enabled. These options disable both, which halves the remaining time of
compilation.
"""

import jax
from jax._src import compiler

OPTIONS = {"xla_cpu_parallel_codegen_split_count": 1}
# JAX 0.11 and later refuse this option.
if jax.__version_info__ < (0, 11):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
# The same options for child processes, as flags of XLA and as environment variables.
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": FLAGS}

_get_compile_options = compiler.get_compile_options


def get_compile_options(*args, env_options_overrides=None, **kwargs):
    """Returns the result of JAX's ``get_compile_options`` with ``OPTIONS`` as overrides.

    ``XLA_FLAGS`` would also apply to tests of optimized programs, since XLA reads it once.
    """
    overrides = {**OPTIONS, **(env_options_overrides or {})}
    return _get_compile_options(*args, env_options_overrides=overrides, **kwargs)
