"""JAX's persistent compilation cache: a second start compiles nothing."""

import os
from pathlib import Path

import jax


def user_cache() -> Path:
    """Where the package keeps what it can make again: ``~/.cache/spec_t5x``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spec_t5x"


def enable() -> None:
    """Keeps compiled programs in ``JAX_COMPILATION_CACHE_DIR`` or the user's cache.

    Set that variable to another place, or to an empty string to switch this off.
    """
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if directory is None:
        directory = str(user_cache() / "compiled")
    if not directory:
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    # Small programs count as well: starting fast is the point.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
