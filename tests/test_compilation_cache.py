"""Compiled programs outlive the process, where the user wants them to."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax
from spec_t5x.compilation_cache import enable
enable()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x * 2 + 1)(1.0)
"""


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({"XDG_CACHE_HOME": "{tmp}/user"}, "user/spec_t5x/compiled"),
        ({"JAX_COMPILATION_CACHE_DIR": "{tmp}/own"}, "own"),
        ({"XDG_CACHE_HOME": "{tmp}/user", "JAX_COMPILATION_CACHE_DIR": ""}, None),
    ],
    ids=["by default", "named", "switched off"],
)
def test_programs_are_kept_where_the_environment_says(tmp_path, variables, kept):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {name: value.format(tmp=tmp_path) for name, value in variables.items()}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert bool(files) == bool(kept)
    assert all(path.is_relative_to(tmp_path / kept) for path in files)
