"""Rounds of the comparison: runs every row of the table in a new process, derives figures."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.other_implementations.bound import bytes_read, read_bandwidth
from benchmarks.other_implementations.workload import RANDOM, Workload
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config
from spec_t5x.names import AUTO

IMPLEMENTATIONS = ("transformers", "ctranslate2", "openvino", "t5x")


@dataclasses.dataclass(frozen=True)
class Row:
    """Row of the table: the name of a function in ``implementations``, and its arguments."""

    name: str
    implementation: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Says whether a target call may yield several tokens, and whether the weights are unrounded
    # (other rows get a footnote).
    speculative: bool = False
    exact: bool = True


def make_rows(
    workload: Workload,
    drafts: Sequence[str],
    gammas: Sequence[int],
    verifier: str = "block",
    others: Sequence[str] = IMPLEMENTATIONS,
    weights: Sequence[str] = (AUTO,),
) -> list[Row]:
    """Returns all rows; the first is plain decoding with this package, the baseline."""
    rows, assisted = [], {}
    alphas = workload.alphas or (None,) * len(drafts)
    if workload.draft_copy and not workload.alphas:
        # With random weights transformers would reject all drafts: it cannot draw verdicts.
        assisted = {f"gamma {gamma}": {"gamma": gamma} for gamma in gammas}
        assisted["its own gamma"] = {}
    for width in weights:
        name, exact = ("spec_t5x", True) if width == AUTO else (f"spec_t5x in {width}", False)
        rows.append(Row(f"{name}, plain", "ours", {"weights": width}, exact=exact))
        for draft, alpha in zip(drafts, alphas, strict=True):
            if draft == RANDOM and not workload.draft_copy:
                continue
            proposes = f"{name}, {draft}" if alpha is None else f"{name}, {draft} at {alpha:g}"
            for gamma in gammas:
                arguments = {"draft": draft, "gamma": gamma, "verifier": verifier}
                arguments |= {"weights": width, "alpha": alpha}
                rows.append(Row(f"{proposes}, gamma {gamma}", "ours", arguments, True, exact))
    if "transformers" in others:
        rows.append(Row("transformers, eager", "transformers"))
        rows.append(Row("transformers, static cache", "transformers", {"cache": "static"}))
        for name, arguments in assisted.items():
            arguments = {"assisted": True, **arguments}
            rows.append(Row(f"transformers, assisted, {name}", "transformers", arguments, True))
        for gamma in gammas if "copy" in drafts else ():
            name = f"transformers, prompt lookup, {gamma} tokens"
            rows.append(Row(name, "transformers", {"lookup": gamma}, True))
    if "ctranslate2" in others:
        for kind in ("float32", "int8"):
            arguments, exact = {"compute_type": kind}, kind == "float32"
            rows.append(Row(f"CTranslate2, {kind}", "ctranslate2", arguments, exact=exact))
    if "openvino" in others:
        rows.append(Row("OpenVINO, int8", "openvino", exact=False))
    if "t5x" in others:
        rows.append(Row("T5X, temperature_sample", "t5x"))
    return rows


def measure(
    workload: Workload, config: T5Config, rows: Sequence[Row], num_rounds: int
) -> dict[str, Any]:
    """Measures all rows of one target; returns the JSON values that ``table`` takes.

    Raises:
      InputError: a row of this package fails.
    """
    results, bandwidths = {row.name: [] for row in rows}, []
    for number in range(num_rounds):
        first = number % len(rows)
        for row in (*rows[first:], *rows[:first]):
            if any("problem" in result for result in results[row.name]):
                continue
            print(f"{workload.title}, round {number + 1}: {row.name}", file=sys.stderr, flush=True)
            results[row.name].append(run(workload, row))
            if row.implementation == "ours" and "problem" in results[row.name][-1]:
                raise InputError(f"{row.name}: {results[row.name][-1]['problem']}")
        outputs = results[rows[0].name][0]["outputs"]
        num_tokens = sum(map(len, outputs))
        lengths = [(len(i), len(o)) for i, o in zip(workload.inputs, outputs, strict=True)]
        encoder, decoder = bytes_read(config, lengths)
        bandwidths.append(read_bandwidth(decoder // num_tokens, workload.threads))
    # The highest of all rounds, as a bound must not be exceeded.
    bandwidth = max(bandwidths)
    group = {
        "title": workload.title,
        "num_inputs": len(workload.inputs),
        "source_tokens": sum(map(len, workload.inputs)),
        "num_tokens": num_tokens,
        "threads": workload.threads,
        "alphas": workload.alphas,
        "bound": {
            "step_bytes": decoder // num_tokens,
            "bytes_per_second": bandwidth,
            "step_seconds": decoder / num_tokens / bandwidth,
            "token_seconds": (encoder + decoder) / num_tokens / bandwidth,
        },
    }
    plain = results[rows[0].name]
    return group | {"rows": [_figures(row, results[row.name], plain, group) for row in rows]}


def _figures(
    row: Row, results: Sequence[dict], plain: Sequence[dict], group: dict[str, Any]
) -> dict[str, Any]:
    """Returns the figures of a row from its runs and those of plain decoding."""
    found = {"name": row.name, "exact": row.exact}
    if problems := [result["problem"] for result in results if "problem" in result]:
        return found | {"problem": problems[0]}
    outputs = results[0]["outputs"]
    num_tokens, num_inputs = sum(map(len, outputs)), group["num_inputs"]
    seconds, first = ([r[n] for r in results] for n in ("seconds", "first_token_seconds"))
    per_token = median(seconds) / num_tokens
    # Ratios are taken in each round, so that drift from round to round cancels.
    ratios = [p["seconds"] / s for p, s in zip(plain, seconds, strict=True)]
    found |= {
        "version": results[0]["version"],
        # Time to decode all inputs, in each round.
        "seconds": seconds,
        "seconds_per_token": per_token,
        "speed_up": median(ratios) * num_tokens / group["num_tokens"],
        "times_bound": per_token / group["bound"]["token_seconds"],
        "first_token_seconds": median(first) / num_inputs,
        "compile_seconds": median(result["compile_seconds"] for result in results),
        "peak_bytes": results[0]["peak_bytes"],
    }
    if not row.speculative and num_tokens > num_inputs:
        # Not for speculation, whose first call may yield several tokens.
        steps = median(s - f for s, f in zip(seconds, first, strict=True))
        found["step_seconds"] = steps / (num_tokens - num_inputs)
    if not row.speculative or group["alphas"] is None:
        # Number of outputs that differ from plain decoding.
        pairs = zip(plain[0]["outputs"], outputs, strict=True)
        found["num_different"] = sum(ours != theirs for ours, theirs in pairs)
    return found


def run(workload: Workload, row: Row) -> dict[str, Any]:
    """Runs ``one_run`` for a row in a new process; returns its result, or a ``problem``."""
    request = {"workload": dataclasses.asdict(workload), "arguments": row.arguments}
    request["implementation"] = row.implementation
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "in.json", Path(folder) / "out.json"
        given.write_text(json.dumps(request), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.other_implementations.one_run", given, found],
            env={**os.environ, **environment(workload.threads)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        if found.exists():
            return json.loads(found.read_text(encoding="utf-8"))
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"problem": f"ended with status {done.returncode}: {last[:300]}"}


def environment(threads: int) -> dict[str, str]:
    """Returns environment variables that set the libraries' threads and disable caches."""
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC")
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **{name: str(threads) for name in counts},
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        # No cache, because compilation is measured.
        "JAX_COMPILATION_CACHE_DIR": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
