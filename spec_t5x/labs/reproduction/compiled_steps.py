"""Predictions of Table 2's rows, from costs of the same networks compiled for a TPU-v4 chip.

libtpu compiles on any Linux machine without a TPU. It needs environment variables and JAX on the
CPU, and so runs in a child process: the other measurements keep their device.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from spec_t5x.errors import InputError
from spec_t5x.labs.benchmark import paper_tables
from spec_t5x.labs.benchmark.paper_tables import SpeedUp
from spec_t5x.labs.reproduction.contents import ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Measure
from spec_t5x.labs.tpu import chips, compilation
from spec_t5x.labs.tpu.options import Options
from spec_t5x.machine.extras import EXTRAS, version

NOTE = (
    "Compiled: Theorem 3.8 with the paper's α, and c and T(γ+1) as roofline times of the compiled "
    "steps (the slower of arithmetic and memory traffic), source of 512 tokens; without a TPU. "
    f"A quick run compiles one draft and γ. It takes libtpu: {EXTRAS['libtpu'].remedy} (Linux)."
)


def key(row: SpeedUp) -> tuple[str, str, float]:
    """Returns task, draft and temperature, which identify a row of Table 2."""
    return row.task, row.draft, row.temperature


def measure(options: ReproduceOptions, results: Measure) -> list[dict[str, Any]]:
    """Returns predictions for Table 2, each with its row's key; [] if nothing can be compiled."""
    if chips.no_compiler():
        return []
    rows = paper_tables.TABLE_2
    if options.quick:
        rows = [row for row in rows if (row.draft, row.gamma) == (rows[0].draft, rows[0].gamma)]
    keys = [key(row) for row in rows]
    inputs = {"version": 2, "rows": keys, "libtpu": version("libtpu")}
    found = results("compiled/table2", inputs, functools.partial(_in_child, keys))
    return found["rows"] if found else []


def _in_child(keys: Sequence[tuple]) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, json.dumps(keys)]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode:
        raise InputError(
            f"compiling for a TPU-v4 ended with status {done.returncode}, mostly for lack of "
            "memory: leave table2 out, or use a machine with 16 GiB"
        )
    return {"rows": json.loads(done.stdout)}


def _predict(keys: Sequence[Sequence]) -> list[dict[str, Any]]:
    """Predicts c, T(gamma + 1) and the speed-up for the rows of Table 2 with these keys."""
    chips.prepare_environment()
    rows = [row for row in paper_tables.TABLE_2 if list(key(row)) in keys]
    found = compilation.predict_rows(Options(), rows)
    names = ("c", "verification_cost", "speed_up")
    return [
        {"key": key(row)} | {name: getattr(prediction, name) for name in names}
        for row, prediction in zip(rows, found, strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps(_predict(json.loads(sys.argv[1]))))
