"""Commands in other processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]


def finished(
    *command: Any, cwd: Path = REPOSITORY, timeout: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; ``variables`` are added to the environment."""
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def printed(*arguments: Any, **how: Any) -> str:
    """Returns the standard output of Python with these arguments, which must exit with 0."""
    done = finished(sys.executable, *arguments, **how)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def free_address() -> str:
    """Returns an address of this machine at which processes can meet."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"
