"""The fastest compilation, for programs that run for a moment.

Without optimizations, as JAX's own setting has it, and without what XLA spends on speed
regardless: fusion emitters, and programs in many parts. Leaving that out
halves what is left.
"""

import jax
from jax._src import compiler

OPTIONS = {"xla_cpu_parallel_codegen_split_count": 1}
# Later versions have no other fusions, and refuse the option.
if jax.__version_info__ < (0, 11):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
# For other processes: as ``XLA_FLAGS``, and with JAX's own setting beside them.
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": FLAGS}

_get_compile_options = compiler.get_compile_options


def get_compile_options(*args, env_options_overrides=None, **kwargs):
    """Returns the options of JAX's function of this name with ``OPTIONS``.

    ``XLA_FLAGS`` is read once, and would hold for the tests of optimized programs too.
    """
    overrides = {**OPTIONS, **(env_options_overrides or {})}
    return _get_compile_options(*args, env_options_overrides=overrides, **kwargs)
