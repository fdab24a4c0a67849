"""Times plain and speculative decoding at several batch sizes, by XLA and by ``contrib/gpu``.

    python -m benchmarks.decoding --target t5_1_1_small --gamma 0 --profile
    python -m benchmarks.decoding --target t5_1_1_xl --batch 1 8 32 64 128 --gamma 0 4 \\
        --source_len 400 --json decoding.json

All programs are compiled at once, where ``spec-t5x benchmark`` compiles one by one. Programs of one
way and batch size are compared, so they take rounds in turn; times are medians. XLA's programs run
first, because a kernel that never ends, or after which every program fails, costs all later rows.
Gamma 0 is plain decoding. ``--profile`` also records the kernels of a prefill and of one iteration:
the loop is one launch. Weights and sources are random, and acceptances are simulated with
probability ``--alpha``. On a CPU, JAX's interpreter runs the kernels, and there is no profile: a
test of this script.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled, Lowered

from benchmarks import command, random_pair
from benchmarks.gpu_launches import BY, MOST_INNER_HELP, all_kernels, computed_by
from spec_t5x.contrib.gpu.operations import MOST_INNER
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError, check_numbers, one_line
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.benchmark.random_models import random_sources
from spec_t5x.labs.benchmark.simulated_acceptance import SimulatedVerifier
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.outputs import Decoded, row_keys
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.operations import XLA
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.sampling.distributions import sampling
from spec_t5x.tuning.timed_calls import NO_EOS
from spec_t5x.types import Array


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes JSON if asked to; returns 0, or 2 on an input error."""
    parser = command.parser("decoding", __doc__)
    random_pair.add_options(parser)
    add = parser.add_argument
    add("--target", default="t5_1_1_xl", help="published size of the target (t5_1_1_xl)")
    add("--draft", default="t5_1_1_small", help="published size of the draft (t5_1_1_small)")
    add("--batch", nargs="+", type=int, default=[1], help="rows of a batch (1)")
    add("--by", nargs="+", choices=BY, default=list(BY), help="what computes layers (both)")
    add("--most_inner", type=int, default=MOST_INNER, help=MOST_INNER_HELP)
    add("--temperature", type=float, default=0.0, help="temperature of sampling (0)")
    add("--source_len", type=int, default=512, help="tokens of a source (512)")
    add("--max_decode_len", type=int, default=128, help="tokens of a text (128)")
    add("--repeats", type=int, default=5, help="rounds (5)")
    add("--profile", action="store_true", help="record the kernels of each program")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    return command.run_timed(parser, arguments, measure, table)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields times of each program, as JSON values; with ``--profile`` again, with its kernels.

    ``contrib/gpu`` is left out where it suits neither model: its program would be XLA's.

    Raises:
      InputError: a number below its least, an unknown size, or too little memory; after all rows,
        programs that could not be compiled or run, or whose kernels were not recorded, and why.
    """
    check_numbers(0, gamma=min(args.gamma))
    numbers = {"source_len": args.source_len, "max_decode_len": args.max_decode_len}
    check_numbers(1, batch=min(args.batch), repeats=args.repeats, **numbers)
    verifier = SimulatedVerifier(alpha=args.alpha)
    pair = random_pair.make(args.target, args.draft, args)
    calls = []
    for by in (way for way in BY if way in args.by):
        models = [computed_by(BY[by], model, args.most_inner) for model in pair]
        for batch, gamma in itertools.product(args.batch, args.gamma):
            used = models if gamma else models[:1]
            if by == "XLA" or any(model.operations is not XLA for model in used):
                target, draft = models[0], TransformerDraft(models[1])
                calls.append(_Call(args, verifier, batch, gamma, by, target, draft))
    found = list(zip(calls, _programs(calls), strict=True))
    failed = [(call, each) for call, each in found if isinstance(each, Exception)]
    programs = [(call, each) for call, each in found if not isinstance(each, Exception)]
    timed, unrecorded = [], []
    for _, group in itertools.groupby(programs, key=lambda pair: (pair[0].by, pair[0].batch)):
        compared = list(group)
        failed += _rounds(compared, args.repeats + 1)
        for call, program in compared:
            # After a wrong read or write on a GPU all programs fail. The first round is not used.
            if len(call.seconds) > 1:
                timed.append((call, program, call.row()))
                yield timed[-1][-1]
    # A profiler slows what is timed after it, so all programs are timed before one is profiled.
    for call, program, row in timed if args.profile else ():
        try:
            row["kernels"] = call.kernels(program)
            yield row
        except Exception as error:  # the times are kept
            unrecorded.append((call, error))
    told = [
        *_told(failed, "cannot be compiled or run", "leave them out"),
        *_told(unrecorded, "ran, and their kernels were not recorded", "leave out --profile"),
    ]
    if told:
        raise InputError("; ".join(told))


def _rounds(
    programs: Sequence[tuple["_Call", Compiled]], number: int
) -> list[tuple["_Call", Exception]]:
    """Times programs in turn, ``number`` times each; returns those that failed, and why."""
    running, failed = programs, []
    for _ in range(number):
        for call, program in running:
            try:
                call.time(program)
            except Exception as error:  # too little memory, or a kernel that cannot run
                failed.append((call, error))
                running = [pair for pair in running if pair[0] is not call]
    return failed


def _told(failed: Sequence[tuple["_Call", Exception]], what: str, remedy: str) -> list[str]:
    """Returns a sentence for each reason, with the programs that failed for it."""
    names: dict[str, list[str]] = collections.defaultdict(list)
    for call, error in failed:
        name = f"batch {call.batch}, gamma {call.gamma} by {call.by}"
        names[one_line(error, most=2000)].append(name)
    return [f"{'; '.join(each)} {what} ({reason}): {remedy}" for reason, each in names.items()]


def _programs(calls: Sequence["_Call"]) -> list[Compiled | Exception]:
    """Compiles all programs at once; returns an exception in place of one that fails."""

    def tried(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:  # XLA and Triton raise unrelated types
            return error

    # Lowered one by one, because the choice of kernels holds for all threads.
    lowered = [tried(call.lower) for call in calls]
    with ThreadPoolExecutor() as pool:
        return list(
            pool.map(lambda e: e if isinstance(e, Exception) else tried(e.compile), lowered)
        )


@dataclasses.dataclass
class _Call:
    """Program of a batch size, a gamma and a way, with its times; the first round is not used."""

    args: argparse.Namespace
    verifier: SimulatedVerifier
    batch: int
    gamma: int
    by: str
    target: T5Model
    draft: TransformerDraft
    seconds: list[float] = dataclasses.field(default_factory=list)
    prefill_seconds: list[float] = dataclasses.field(default_factory=list)
    # Target calls of each run: the mean of its rows, and those of its last row to end.
    target_calls: list[float] = dataclasses.field(default_factory=list)
    most_calls: list[float] = dataclasses.field(default_factory=list)

    def lower(self) -> Lowered:
        """Returns the program before compilation."""
        settings, prompts = sampling(self.args.temperature), jnp.zeros((self.batch, 1), jnp.int32)
        room = {"max_decode_len": self.args.max_decode_len, "eos_id": NO_EOS}
        drafting = {"gamma": self.gamma, "verifier": self.verifier}

        def decode(target, draft, sources, keys, steps) -> Decoded:
            given, how = (sources, prompts, keys, settings), room | {"max_decode_steps": steps}
            if self.gamma:
                return speculative_decode(target, draft, *given, **drafting, **how)
            return autoregressive_decode(target, *given, **how)

        with all_kernels(self.by != "XLA"):
            return jax.jit(decode).lower(self.target, self.draft, *self._inputs(0, 0))

    def time(self, program: Compiled) -> None:
        """Runs the program, and then the prefill alone: with no token to generate."""
        number = len(self.seconds)
        taken, decoded = self._run(program, number, self.args.max_decode_len)
        prefill_taken, _ = self._run(program, number, 0)
        # Recorded once both have run.
        self.seconds.append(taken)
        self.prefill_seconds.append(prefill_taken)
        if self.gamma:
            self.target_calls.append(float(jnp.mean(decoded.stats.target_calls)))
            self.most_calls.append(float(jnp.max(decoded.stats.target_calls)))

    def row(self) -> dict[str, Any]:
        """Returns the measurements as JSON values."""
        length = self.args.max_decode_len
        whole, prefill = map(statistics.median, (self.seconds[1:], self.prefill_seconds[1:]))
        calls, most = (
            statistics.fmean(each[1:]) if self.gamma else length
            for each in (self.target_calls, self.most_calls)
        )
        return {
            "batch": self.batch,
            "gamma": self.gamma,
            "by": self.by,
            "tokens_per_second": self.batch * length / whole,
            "without_prefill": self.batch * length / (whole - prefill),
            "block_efficiency": length / calls,
            "call_microseconds": 1e6 * (whole - prefill) / most,
            "seconds": self.seconds[1:],
            "prefill_seconds": self.prefill_seconds[1:],
        }

    def kernels(self, program: Compiled) -> list[dict[str, Any]]:
        """Returns the kernels that a profiler records, those of the longest total time first."""
        durations: dict[str, list[float]] = collections.defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self._run(program, 0, self.args.max_decode_len)
            for file in Path(folder).rglob("*.xplane.pb"):
                for name, microseconds in _events(file):
                    durations[name].append(microseconds)
        return [
            {"name": name, "number": len(each), "microseconds": statistics.median(each)}
            for name, each in sorted(durations.items(), key=lambda item: -sum(item[1]))
        ]

    def _run(self, program: Compiled, number: int, steps: int) -> tuple[float, Decoded]:
        inputs = jax.block_until_ready(self._inputs(number, steps))
        start = time.perf_counter()
        decoded = jax.block_until_ready(program(self.target, self.draft, *inputs))
        return time.perf_counter() - start, decoded

    def _inputs(self, number: int, steps: int) -> tuple[Array, ...]:
        keys = row_keys(jax.random.key(number), self.batch)
        return self._sources, keys, jnp.full(self.batch, steps, jnp.int32)

    @functools.cached_property
    def _sources(self) -> Array:
        return jnp.asarray(random_sources(self.target, self.batch, self.args.source_len, 0))


def _events(file: Path) -> Iterator[tuple[str, float]]:
    """Yields names and microseconds of what ran on a GPU's streams, from a profiler's file."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if plane.name.startswith("/device:GPU"):
            streams = (line for line in plane.lines if "Stream" in line.name)
            for event in itertools.chain.from_iterable(line.events for line in streams):
                yield event.name, event.duration_ns / 1e3


def table(rows: Sequence[dict[str, Any]]) -> results.Table:
    """Makes a table with a line for each program."""
    plain = {(row["batch"], row["by"]): row for row in rows if not row["gamma"]}

    def speed_up(row: dict[str, Any]) -> str | None:
        # Where contrib/gpu suits the draft alone, XLA decodes plainly.
        found = plain.get((row["batch"], row["by"])) or plain.get((row["batch"], "XLA"))
        if not (found and row["gamma"]):
            return None
        return f"{row['tokens_per_second'] / found['tokens_per_second']:.2f}"

    columns = {
        "batch": lambda row: str(row["batch"]),
        "gamma": lambda row: str(row["gamma"]),
        "layers by": lambda row: row["by"],
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "without prefill": lambda row: f"{row['without_prefill']:,.0f}",
        "prefill (ms)": lambda row: f"{1e3 * statistics.median(row['prefill_seconds']):.1f}",
        "a call (µs)¹": lambda row: f"{row['call_microseconds']:.0f}",
        "block efficiency": lambda row: f"{row['block_efficiency']:.2f}",
        "speed-up": speed_up,
    }
    note = "¹ A call of the target and the draft steps before it, without the prefill."
    return results.table(columns, rows, note)


if __name__ == "__main__":
    sys.exit(main())
