"""Runs programs with several simulated CPU devices, whose number is fixed when JAX starts."""

import json
from pathlib import Path
from typing import Any

from tests import quick_compilation
from tests.child import printed


def printed_by(program: str, *arguments: str | Path, devices: int, cache: Path | str = "") -> Any:
    """Returns the parsed JSON that a program prints in a process with ``devices`` CPU devices.

    Args:
      program: path of the program, relative to ``tests``.
      *arguments: command-line arguments of the program.
      devices: number of simulated devices.
      cache: directory of JAX's compilation cache; "" disables it.
    """
    flags = f"{quick_compilation.FLAGS} --xla_force_host_platform_device_count={devices}"
    variables = {"JAX_COMPILATION_CACHE_DIR": str(cache), "XLA_FLAGS": flags}
    return json.loads(printed(f"tests/{program}", *arguments, JAX_PLATFORMS="cpu", **variables))
