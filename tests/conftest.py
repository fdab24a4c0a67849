"""Checks that hold in every test, and the fixtures that many share."""

import os
from pathlib import Path

# Before JAX is imported. The suite is written for the CPU and runs the same anywhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

REPOSITORY = Path(__file__).parents[1]
SHARED = REPOSITORY.parent / "shared"

# Programs compiled by an earlier run are reused; a fresh clone starts without.
jax.config.update("jax_compilation_cache_dir", str(REPOSITORY / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def strict_rank_promotion():
    """No array is broadcast to another rank by accident, in our code."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text that lies beside the repository, where there is one."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"needs the real text of {SHARED.name}/data beside the repository")
    return SHARED / "data"
