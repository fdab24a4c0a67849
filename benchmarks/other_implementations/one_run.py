"""Process of one row in one round: ``python -m benchmarks.other_implementations.one_run IN OUT``.

IN is a JSON file with the workload, the implementation's name and its arguments. OUT receives

    version               of the implementation
    seconds               time to decode all inputs; first_token_seconds: one token of each
    compile_seconds       extra time of the first decoding of all inputs
    peak_bytes            peak memory of the process, libraries included; null if unknown
    outputs               token ids of each input, up to the end of sequence

or ``problem``, a line with the reason why there is no result.
"""

import json
import sys
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.other_implementations import implementations
from benchmarks.other_implementations.workload import Workload
from spec_t5x.types import EOS_ID

_SECONDS = 1.0


def measure(workload: Workload, implementation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Loads the implementation, decodes all inputs as a warm-up, then times; returns OUT."""
    version, decode = getattr(implementations, implementation)(workload, **arguments)

    def timed(max_tokens: int) -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        outputs = [decode(ids, max_tokens) for ids in workload.inputs]
        return time.perf_counter() - start, outputs

    def typical(max_tokens: int) -> float:
        """Returns the median time of runs that take at least ``_SECONDS`` together."""
        found = [timed(max_tokens)[0]]
        while sum(found) < _SECONDS:
            found.append(timed(max_tokens)[0])
        return median(found)

    first, outputs = timed(workload.max_decode_len)
    timed(1)
    seconds = typical(workload.max_decode_len)
    return {
        "version": version,
        "seconds": seconds,
        "first_token_seconds": typical(1),
        "compile_seconds": max(first - seconds, 0.0),
        "peak_bytes": _peak_bytes(),
        "outputs": [until_end(ids) for ids in outputs],
    }


def until_end(ids: list[int]) -> list[int]:
    """Returns the ids up to and including the first end of sequence."""
    return ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids


def _peak_bytes() -> int | None:
    """Returns this process's peak from /proc, as getrusage inherits the parent's; None without."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.is_file() else ()
    return next((1024 * int(s.split()[1]) for s in lines if s.startswith("VmHWM:")), None)


def main() -> None:
    """Reads IN, measures, and writes OUT."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        result = measure(Workload(**request.pop("workload")), **request)
    except ImportError as error:
        result = {"problem": f"not installed: {error}"}
    except Exception as error:
        traceback.print_exc()
        result = {"problem": " ".join(f"does not run: {type(error).__name__}: {error}".split())}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
