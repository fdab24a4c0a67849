"""Programs of tests that need several devices: JAX makes them of one processor at its start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import quick_compilation

REPOSITORY = Path(__file__).parents[1]


def printed_by(program: str, *arguments: str | Path, devices: int, cache: Path | str = "") -> Any:
    """Returns the JSON that a program prints in a process with so many CPU devices.

    Args:
      program: its path from ``tests``.
      *arguments: it is given.
      devices: how many there shall be.
      cache: where JAX keeps compiled programs; nowhere by default.
    """
    flags = f"{quick_compilation.FLAGS} --xla_force_host_platform_device_count={devices}"
    result = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / program, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "XLA_FLAGS": flags,
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
