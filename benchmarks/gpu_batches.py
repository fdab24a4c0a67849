"""Times plain and speculative decoding of a model's shape at several batch sizes.

    python -m benchmarks.gpu_batches --target t5_1_1_xl --draft t5_1_1_small --gamma 0 4 7 \\
        --batch 1 8 32 64 128 --source_len 400 --json gpu_batches.json

All programs are compiled at once, which ``spec-t5x benchmark`` does one by one; then rounds of all
programs follow each other, and times are medians. Gamma 0 is plain decoding. Weights and sources
are random, and verdicts are drawn with probability ``--alpha``.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from benchmarks import command
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import check_at_least
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.benchmark.drawn_verdicts import DrawnVerifier
from spec_t5x.labs.benchmark.random_models import (
    check_fits,
    check_vocabulary,
    random_model,
    random_sources,
)
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.outputs import row_keys
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine import xla_flags
from spec_t5x.machine.description import machine
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import size
from spec_t5x.names import AUTO, KV, WEIGHTS
from spec_t5x.sampling.distributions import sampling
from spec_t5x.types import Array

_COMPILING = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes JSON if asked to; returns 0, or 2 on an input error."""
    parser = command.parser("gpu_batches", __doc__)
    add = parser.add_argument
    add("--target", default="t5_1_1_xl", help="published size of the target (t5_1_1_xl)")
    add("--draft", default="t5_1_1_small", help="published size of the draft (t5_1_1_small)")
    add("--batch", nargs="+", type=int, default=[1], help="rows of a batch (1)")
    add("--gamma", nargs="+", type=int, default=[0, 4], help="drafts; 0 is plain decoding (0 4)")
    add("--alpha", type=float, default=0.75, help="acceptance rate (0.75)")
    add("--temperature", type=float, default=0.0, help="temperature of sampling (0)")
    add("--source_len", type=int, default=400, help="tokens of a source (400)")
    add("--max_decode_len", type=int, default=128, help="tokens of a text (128)")
    add("--dtype", default=AUTO, help="type that the networks compute in (auto)")
    add("--weights", default=AUTO, choices=WEIGHTS, help="type of the target's weights (auto)")
    add("--kv", default=AUTO, choices=KV, help="type of the source's keys and values (auto)")
    add("--repeats", type=int, default=3, help="rounds (3)")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    args = parser.parse_args(arguments)
    xla_flags.apply()
    settings = {"machine": machine(), **command.options(args)}
    return command.run("gpu_batches", args, measure(args), table, settings)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the times of each program, as JSON values.

    Raises:
      InputError: a number below its least, an unknown size, or too little memory.
    """
    check_at_least(args, source_len=1, max_decode_len=1, repeats=1)
    for name, least in (("batch", 1), ("gamma", 0)):
        check_at_least(argparse.Namespace(**{name: min(getattr(args, name))}), **{name: least})
    verifier = DrawnVerifier(alpha=args.alpha)
    dtype = resolve_dtype(args.dtype)
    check_vocabulary(args.target, [args.draft])
    check_fits(args.target, [args.draft], dtype)
    target = random_model(size(args.target), dtype, 0, args.weights, args.kv)
    draft = TransformerDraft(random_model(size(args.draft), dtype, 1))
    calls = [_Call(args, target, rows, gamma) for rows in args.batch for gamma in args.gamma]
    with ThreadPoolExecutor(_COMPILING) as pool:
        lowered = [pool.submit(call.lower(target, draft, verifier).compile) for call in calls]
        programs = [each.result() for each in lowered]
    for _ in range(args.repeats + 1):
        for call, program in zip(calls, programs, strict=True):
            call.time(program, target, draft)
    for call in calls:
        yield call.row()


@dataclasses.dataclass
class _Call:
    """Program of a batch size and gamma, and the seconds of its calls; the first is not kept."""

    args: argparse.Namespace
    target: T5Model
    rows: int
    gamma: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    prefill_seconds: list[float] = dataclasses.field(default_factory=list)
    target_calls: list[float] = dataclasses.field(default_factory=list)

    def lower(self, target: T5Model, draft: TransformerDraft, verifier: DrawnVerifier):
        """Returns the program's code before compilation."""
        how = {"max_decode_len": self.args.max_decode_len, "eos_id": -1}
        settings, prompts = sampling(self.args.temperature), jnp.zeros((self.rows, 1), jnp.int32)

        def decode(target, draft, sources, keys, steps):
            given = sources, prompts, keys, settings
            if not self.gamma:
                return autoregressive_decode(target, *given, max_decode_steps=steps, **how)
            drafting = functools.partial(speculative_decode, gamma=self.gamma, verifier=verifier)
            return drafting(target, draft, *given, max_decode_steps=steps, **how)

        return jax.jit(decode).lower(target, draft, *self._inputs(0, 0))

    def time(self, program: Compiled, target: T5Model, draft: TransformerDraft) -> None:
        """Runs the program, and then its prefill alone: with no token to be generated."""
        number = len(self.seconds)
        for steps, seconds in ((self.args.max_decode_len, self.seconds), (0, self.prefill_seconds)):
            inputs = jax.block_until_ready(self._inputs(number, steps))
            start = time.perf_counter()
            decoded = jax.block_until_ready(program(target, draft, *inputs))
            seconds.append(time.perf_counter() - start)
            if steps and self.gamma:
                calls = decoded.stats.target_calls
                self.target_calls.append(float(jnp.mean(calls.astype(jnp.float32))))

    def _inputs(self, number: int, steps: int) -> tuple[Array, ...]:
        sources = random_sources(self.target, self.rows, self.args.source_len, 0)
        keys = row_keys(jax.random.key(number), self.rows)
        return jnp.asarray(sources), keys, jnp.full(self.rows, steps, jnp.int32)

    def row(self) -> dict[str, Any]:
        """Returns the measurements as JSON values."""
        tokens = self.rows * self.args.max_decode_len
        whole, prefill = map(statistics.median, (self.seconds[1:], self.prefill_seconds[1:]))
        calls = statistics.fmean(self.target_calls[1:]) if self.gamma else None
        return {
            "batch": self.rows,
            "gamma": self.gamma,
            "tokens_per_second": tokens / whole,
            "without_prefill": tokens / (whole - prefill),
            "block_efficiency": calls and self.args.max_decode_len / calls,
            "seconds": self.seconds[1:],
            "prefill_seconds": self.prefill_seconds[1:],
        }


def table(rows: Sequence[dict[str, Any]]) -> results.Table:
    """Makes a table with a line for each program."""
    plain = {row["batch"]: row["tokens_per_second"] for row in rows if not row["gamma"]}

    def speed_up(row: dict[str, Any]) -> str | None:
        found = plain.get(row["batch"]) if row["gamma"] else None
        return found and f"{row['tokens_per_second'] / found:.2f}"

    def efficiency(row: dict[str, Any]) -> str | None:
        return row["block_efficiency"] and f"{row['block_efficiency']:.2f}"

    columns = {
        "batch": lambda row: str(row["batch"]),
        "gamma": lambda row: str(row["gamma"]),
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "without prefill": lambda row: f"{row['without_prefill']:,.0f}",
        "prefill, ms": lambda row: f"{1e3 * statistics.median(row['prefill_seconds']):.1f}",
        "block efficiency": efficiency,
        "speed-up": speed_up,
    }
    return results.table(columns, rows)


if __name__ == "__main__":
    sys.exit(main())
