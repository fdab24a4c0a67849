"""Runs programs with several simulated CPU devices, whose number is fixed when JAX starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import quick_compilation

REPOSITORY = Path(__file__).parents[1]


def printed_by(program: str, *arguments: str | Path, devices: int, cache: Path | str = "") -> Any:
    """Returns the parsed JSON that a program prints in a process with ``devices`` CPU devices.

    Args:
      program: path of the program, relative to ``tests``.
      *arguments: command-line arguments of the program.
      devices: number of simulated devices.
      cache: directory of JAX's compilation cache; "" disables it.
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
