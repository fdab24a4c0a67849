"""Commands in other processes."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
# Seconds after which a process, a thread or a page is taken to hang, on any machine.
HANGS = 600


def finished(
    *command: Any, cwd: Path = REPOSITORY, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; ``variables`` are added to the environment."""
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables,
        capture_output=True,
        text=True,
    )


def printed(*arguments: Any, **how: Any) -> str:
    """Returns the standard output of Python with these arguments, which must exit with 0."""
    done = finished(sys.executable, *arguments, **how)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def together(commands: Iterable[list[str]], **options: Any) -> list[tuple[str, str]]:
    """Runs commands side by side, which must exit with 0; returns output and errors of each.

    ``options`` are those of ``Popen``. The streams are files, not pipes: the commands wait for each
    other, and none may wait to be read.
    """
    with contextlib.ExitStack() as stack:
        streams, children = [], []
        for command in commands:
            out, errors = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            child = subprocess.Popen(command, stdout=out, stderr=errors, **options)
            stack.enter_context(child)
            stack.callback(child.kill)
            streams.append((out, errors))
            children.append(child)
        codes = [child.wait(HANGS) for child in children]
        for stream in (stream for pair in streams for stream in pair):
            stream.seek(0)
        said = [(out.read(), errors.read()) for out, errors in streams]
    assert not any(codes), "\n".join(errors[-6000:] for _, errors in said)
    return said


@contextlib.contextmanager
def meeting_point() -> Iterator[str]:
    """Yields an address of this machine at which processes can meet, and keeps it from others.

    The socket has SO_REUSEPORT and does not listen, so that JAX's coordinator can use its port.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("localhost", 0))
        yield f"localhost:{kept.getsockname()[1]}"
