"""A process that decodes with one implementation when it is told to.

Requests and replies are lines of JSON on its standard input and output. What the libraries
print goes to standard error.

    {"do": "open", "name": …, "module": …, "job": …, "arguments": …}   -> version, seconds
    {"do": "prepare", "module": …, "job": …}
    {"do": "decode", "name": …, "ids": …, "max_tokens": …}             -> ids, seconds
    {"do": "encode", "name": …, "ids": …}                              -> seconds, or null
    {"do": "margin", "name": …, "ids": …, "prefix": …, "first": …, "second": …}
    {"do": "peak"}                                                     -> bytes

A reply of ``{"missing": …}`` says that the library is not installed, ``{"error": …}`` that it
failed, ``{"mistake": …}`` that what it was asked for cannot be had.
"""

import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError
from spec_t5x.experiments.neighbours.interface import Decoder, Implementation, Job

_PACKAGE = "spec_t5x.experiments.neighbours"
_STATUS = Path("/proc/self/status")


class Worker:
    """The decoders of this process, by name."""

    def __init__(self):
        self._decoders: dict[str, Decoder] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carries out one request; whatever goes wrong is in the reply."""
        actions: dict[str, Callable] = {
            "open": self._open,
            "prepare": self._prepare,
            "decode": self._decode,
            "encode": self._encode,
            "margin": self._margin,
            "peak": self._peak,
        }
        try:
            return actions[request.pop("do")](**request)
        except ImportError as error:
            return {"missing": _line(error)}
        except InputError as error:
            return {"mistake": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {"error": _line(error)}

    def _open(self, name: str, module: str, job: dict, arguments: dict) -> dict:
        implementation = _import(module)
        seconds, decoder = _timed(implementation.make, Job(**job), **arguments)
        self._decoders[name] = decoder
        return {"version": implementation.version(), "seconds": seconds}

    def _prepare(self, module: str, job: dict) -> dict:
        _import(module).prepare(Job(**job))
        return {}

    def _decode(self, name: str, ids: list[int], max_tokens: int) -> dict:
        seconds, found = _timed(self._decoders[name].decode, ids, max_tokens)
        return {"seconds": seconds, "ids": found}

    def _encode(self, name: str, ids: list[int]) -> dict:
        seconds, done = _timed(self._decoders[name].encode, ids)
        return {"seconds": seconds if done else None}

    def _margin(self, name: str, **arguments: Any) -> dict:
        return {"margin": self._decoders[name].margin(**arguments)}

    def _peak(self) -> dict:
        return {"bytes": peak_memory()}


def peak_memory() -> int:
    """Most bytes that this process had in memory at a time, libraries included."""
    if _STATUS.is_file():
        # Not getrusage: there the process starts with what its parent had.
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _import(module: str) -> Implementation:
    return importlib.import_module(f"{_PACKAGE}.{module}")


def _timed(function: Callable, *args: Any, **kwargs: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return time.perf_counter() - start, result


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _keep_to(threads: int) -> None:
    """As many processors as threads: no library can then use more of them."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def main() -> None:
    """Answers until its input ends."""
    _keep_to(int(sys.argv[1]))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    worker = Worker()
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
