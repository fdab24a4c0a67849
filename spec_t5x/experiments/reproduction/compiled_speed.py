"""Table 2's rows as the costs of the same networks compiled for a TPU-v4 chip give them.

libtpu compiles on any Linux machine, for a chip that is not there. It wants an environment
of its own and JAX on the CPU, so that it runs in a process of its own: the measurements
beside it keep their device.
"""

import concurrent.futures
import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
from collections.abc import Mapping, Sequence

from spec_t5x.errors import InputError
from spec_t5x.experiments import paper_tables
from spec_t5x.experiments.paper_tables import SpeedUp
from spec_t5x.experiments.reproduction.items import Done, Json, Part, Setting

NAME = "compiled/table2"
PARTS = (NAME,)
NOTES = (
    "The prediction is Theorem 3.8 with the paper's alpha, and c and T(gamma+1) as roofline "
    "times of the compiled steps (the slower of arithmetic and memory traffic), source of 512 "
    "tokens. No TPU took part.",
)


def unavailable() -> str | None:
    """Why nothing can be compiled here, or None."""
    if importlib.util.find_spec("libtpu") is None:
        return (
            "libtpu, which compiles for a TPU, is not installed: "
            "pip install 'spec_t5x[tpu-compile]' (Linux)"
        )
    return None


def absences(setting: Setting) -> list[str]:
    """What the table lacks, as sentences."""
    if (reason := unavailable()) is not None:
        return [f"Nothing was compiled for a TPU-v4: {reason}."]
    left_out = len(paper_tables.TABLE_2) - len(_rows(setting))
    if left_out:
        return [f"A quick run leaves {left_out} rows uncompiled."]
    return []


def parts(setting: Setting) -> list[Part]:
    """One part, or none where libtpu is missing."""
    if unavailable() is not None:
        return []
    rows = _rows(setting)
    keys = [_key(row) for row in rows]
    inputs = {"version": 1, "rows": [list(key) for key in keys], "versions": _versions()}
    return [
        Part(
            name=NAME,
            inputs=inputs,
            seconds=55.0 if setting.quick else 200.0,
            compute=lambda report: _compute(keys),
        )
    ]


def predictions(done: Mapping[str, Done]) -> dict[tuple, Json]:
    """By task, draft and temperature; empty where nothing was compiled."""
    if NAME not in done:
        return {}
    return {tuple(row["key"]): row for row in done[NAME].result["rows"]}


def _rows(setting: Setting) -> Sequence[SpeedUp]:
    """A quick run compiles one draft and one gamma: three programs."""
    if not setting.quick:
        return paper_tables.TABLE_2
    first = paper_tables.TABLE_2[0]
    return [
        row for row in paper_tables.TABLE_2 if (row.draft, row.gamma) == (first.draft, first.gamma)
    ]


def _key(row: SpeedUp) -> tuple[str, str, float]:
    return row.task, row.draft, row.temperature


def _versions() -> dict[str, str]:
    # libtpu goes by two names.
    names = {"jax": ("jax",), "jaxlib": ("jaxlib",), "libtpu": ("libtpu", "libtpu-nightly")}
    return {name: _first_version(candidates) for name, candidates in names.items()}


def _first_version(names: Sequence[str]) -> str:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


def _compute(keys: Sequence[tuple]) -> Json:
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        try:
            return {"rows": executor.submit(compile_rows, keys).result()}
        except concurrent.futures.process.BrokenProcessPool as error:
            raise InputError(
                "compiling for a TPU-v4 ended its process, mostly for want of memory: leave "
                "table2 out, or give it 16 GiB"
            ) from error
        except BaseException:
            # A stop is obeyed at once: the executor would wait for its child.
            for child in set(multiprocessing.active_children()) - before:
                child.kill()
            raise


def compile_rows(keys: Sequence[tuple]) -> list[Json]:
    """The rows of Table 2 of these keys: c, T(gamma + 1) and the speed-up. In a child."""
    from spec_t5x.experiments import tpu_chips

    tpu_chips.prepare_environment()
    from spec_t5x.experiments import tpu_compilation

    rows = [row for row in paper_tables.TABLE_2 if _key(row) in keys]
    found = tpu_compilation.predict_rows(tpu_compilation.Options(), rows)
    return [
        {
            "key": list(_key(row)),
            "c": prediction.c,
            "verification_cost": prediction.verification_cost,
            "speed_up": prediction.speed_up,
        }
        for row, prediction in zip(rows, found, strict=True)
    ]
