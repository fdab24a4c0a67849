"""The other end of a ``worker``: starts it, asks it, ends it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Where the package is, installed or not.
_ROOT = Path(__file__).parents[3]


class Process:
    """A worker in a process of its own, which ends with this one."""

    def __init__(self, threads: int):
        """Starts it; importing takes place with the first request.

        Args:
          threads: processors that it keeps to, and threads of its libraries.
        """
        # Read only if the process dies.
        self._messages = tempfile.TemporaryFile(  # noqa: SIM115, closed with the process
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spec_t5x.experiments.neighbours.worker", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env={**os.environ, **environment(threads)},
            encoding="utf-8",
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Sends a request and waits for its reply.

        A worker that has died says so in its reply, too: ``{"error": …}``.
        """
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        return json.loads(reply) if reply else {"error": self._epitaph()}

    def processor_seconds(self) -> float | None:
        """Processor time that it has used so far; None where the system does not say."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        if not stat.is_file():
            return None
        # The name in brackets may hold spaces; user and system time are the 14th and 15th.
        fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._messages.close()

    def _epitaph(self) -> str:
        status = self._process.wait()
        self._messages.seek(0)
        lines = [line.strip() for line in self._messages if line.strip()]
        return f"ended with status {status}" + (f": {lines[-1][:300]}" if lines else "")


def environment(threads: int) -> dict[str, str]:
    """What the libraries read when they are imported."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC")
    return {
        **{name: str(threads) for name in counts},
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        # Compile times are measured.
        "JAX_COMPILATION_CACHE_DIR": "",
        # A thread that waits for work spins, for 200 ms if Intel's OpenMP is left alone: into
        # the next one's turn. Between the parts of a step it may, and sleeping there would
        # slow its library down.
        "KMP_BLOCKTIME": "5",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
