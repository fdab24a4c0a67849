"""Compares bulk inference in slots with static batches: tokens per second and occupancy.

    python -m benchmarks.bulk --target t5-target --draft transformer --data newstest2013.tsv.gz \\
        --prefix "translate English to German: " \\
        --batch_size 8 32 128 --gamma 0 4 --limit 1024 --json benchmarks/bulk_news.json

A slot is a row of a batch that takes the next text when its own has ended; gamma 0 is plain
decoding. Each way decodes the same texts at temperature 0, in turn. Occupancy is the share of rows
in target calls whose text had not ended; it is also simulated from the calls that each text takes.
The host's share is the share of the slots' time that making answers takes. CTranslate2 decodes with
float32 weights in a separate process; its best batch size counts.
"""

import argparse
import contextlib
import heapq
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.other_implementations import implementations
from spec_t5x.checkpoints.convert import convert
from spec_t5x.cli.settings import gamma
from spec_t5x.errors import InputError
from spec_t5x.generation import Answer, GenerateOptions, Generator
from spec_t5x.generation.engine import Engine
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.benchmark.options import TextSource
from spec_t5x.labs.benchmark.reliability import OtherPrograms, caution, doubt
from spec_t5x.labs.benchmark.text_source import read_texts
from spec_t5x.loops.pace import Costs
from spec_t5x.machine.description import machine
from spec_t5x.names import AUTO
from spec_t5x.options import NEUTRAL

# (index, text, token ids) of each input.
Inputs = list[tuple[int, str, list[int]]]


class StaticBatches(Engine):
    """Engine that decodes static batches: each runs until its slowest row has ended."""

    def __init__(self, *args):
        super().__init__(*args)
        self.in_slots = False


class Unanswered(Engine):
    """Engine with slots that makes no answers while it decodes, to time the bursts alone."""

    def collect(self):
        """Discards all but the newest burst under way; returns no answers."""
        while len(self.under_way) > 1:
            self.under_way.popleft()
        return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes JSON if asked to; returns 0, or 2 on an input error."""
    parser = command.parser("bulk", __doc__)
    add = parser.add_argument
    add("--target", default="t5-target", help="checkpoint (t5-target)")
    add("--draft", default="transformer", help="draft, as for spec-t5x generate (transformer)")
    add("--data", required=True, metavar="FILE", help="texts, as for spec-t5x benchmark")
    add("--prefix", default="", metavar="TEXT", help="text to put before every text")
    add("--limit", type=int, default=1024, help="texts to decode (1024)")
    add("--batch_size", nargs="+", type=int, default=[8, 32, 128], help="rows per batch (8 32 128)")
    add("--gamma", nargs="+", type=gamma, default=[0, 4], help="drafts, or auto; 0 is plain (0 4)")
    add("--repeats", type=int, default=3, help="timed rounds (3)")
    add("--ctranslate2", action="store_true", help="time CTranslate2, too")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}: give at least 1")
    try:
        values = measure(args)
        results.show(table(values))
        if args.json:
            results.write_json(args.json, values)
    except InputError as error:
        return command.refuse("bulk", error)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all batch sizes and gammas; returns the figures as JSON values."""
    generator = Generator.load(args.target, args.draft)
    inputs = _inputs(generator, args)
    lines = [
        _Line(generator if gamma else generator.plain(), inputs, gamma, batch)
        for gamma, batch in itertools.product(args.gamma, args.batch_size)
    ]
    with contextlib.ExitStack() as held:
        others = []
        if args.ctranslate2:
            other = _CTranslate2(args.target, inputs, args.batch_size)
            others.append(held.enter_context(contextlib.closing(other)))
        for line in (*lines, *others):
            # A first round that is not kept: it compiles.
            line.time()
        for _ in range(args.repeats):
            for line in (*lines, *others):
                line.time(keep=True)
    outputs = next(iter(lines)).outputs
    return {
        "machine": machine(),
        "target": Path(args.target).name,
        "draft": results.without_folder(args.draft),
        "data": Path(args.data).name,
        "num_inputs": len(inputs),
        "num_tokens": sum(map(len, outputs)),
        "repeats": args.repeats,
        "rows": [line.record(outputs) for line in lines],
        "others": [other.record(outputs) for other in others],
    }


def _inputs(generator: Generator, args: argparse.Namespace) -> Inputs:
    """Reads the first ``--limit`` texts that are short enough for the encoder."""
    options = GenerateOptions()
    texts = read_texts(
        TextSource(data=args.data, prefix=args.prefix), generator, options, args.limit
    )
    return [(place, text, generator.tokenize(text, options)) for place, text in enumerate(texts)]


class _Line:
    """Timings of one batch size and gamma: static batches, slots, and slots without answers."""

    def __init__(self, generator: Generator, inputs: Inputs, gamma: int | str, batch_size: int):
        self.generator, self.inputs = generator, inputs
        self.options = GenerateOptions(gamma=gamma, batch_size=batch_size)
        self.seconds: dict[str, list[float]] = {"batches": [], "slots": [], "bursts": []}
        self.answers: dict[str, dict[int, Answer]] = {}
        self.costs: dict[GenerateOptions, Costs] = {}
        self.occupancy: dict[str, float] = {}
        # Largest share of the processors that other programs used in a round.
        self.beside = 0.0

    def time(self, *, keep: bool = False) -> None:
        """Decodes all inputs in each of the three ways; keeps the times if ``keep``."""
        others = OtherPrograms()
        for way, kind in (("batches", StaticBatches), ("slots", Engine), ("bursts", Unanswered)):
            engine = kind(self.generator, self.options, self.costs)
            start, found = time.perf_counter(), {}
            for batch in self.generator.by_length(self.inputs, self.options):
                engine.submit(*batch)
                for places, answers in engine.collect():
                    found.update(zip(places, answers, strict=True))
            for places, answers in engine.close():
                found.update(zip(places, answers, strict=True))
            self._keep(way, start, keep)
            if way != "bursts":
                self.answers[way] = found
                calls = sum(answer[0].target_calls for answer in found.values())
                self.occupancy[way] = calls / engine.row_calls
        if keep:
            self.beside = max(self.beside, others.share)

    def _keep(self, way: str, start: float, keep: bool) -> None:
        if keep:
            self.seconds[way].append(time.perf_counter() - start)

    @property
    def outputs(self) -> list[list[int]]:
        return [self.answers["slots"][place][0].output_ids for place, *_ in self.inputs]

    def record(self, expected: list[list[int]]) -> dict[str, Any]:
        size, calls = self.options.batch_size, self._calls()
        seconds = {way: statistics.median(times) for way, times in self.seconds.items()}
        tokens = sum(map(len, self.outputs))
        both = (self.seconds["batches"], self.seconds["slots"])
        return {
            "gamma": self.options.gamma,
            "batch_size": size,
            "seconds": self.seconds,
            "tokens_per_second": {way: tokens / each for way, each in seconds.items()},
            "ratio": statistics.median(b / s for b, s in zip(*both, strict=True)),
            "occupancy": self.occupancy,
            "simulated": {
                "batches": simulated_batches(calls, size),
                "slots": simulated_slots(calls, size),
            },
            "host_share": 1 - seconds["bursts"] / seconds["slots"],
            "block_efficiency": tokens / sum(calls),
            "same_answers": self.answers["slots"] == self.answers["batches"],
            "same_text": self.outputs == expected,
            "beside": self.beside,
        }

    def _calls(self) -> list[int]:
        """Returns the target calls of each text in the order of decoding: longest source first."""
        ordered = sorted(self.inputs, key=lambda one: -len(one[2]))
        return [self.answers["slots"][place][0].target_calls for place, *_ in ordered]


def simulated_batches(calls: Sequence[int], rows: int) -> float:
    """Returns the occupancy of static batches of ``rows`` texts, which take ``calls`` in order.

    >>> simulated_batches([4, 2, 3], 2)
    0.6428571428571429
    """
    longest = (max(calls[i : i + rows]) for i in range(0, len(calls), rows))
    return sum(calls) / (rows * sum(longest))


def simulated_slots(calls: Sequence[int], rows: int) -> float:
    """Returns the occupancy of ``rows`` slots that take the next of ``calls`` when they are free.

    >>> simulated_slots([4, 2, 3], 2)
    0.9
    """
    free = [0] * rows
    for each in calls:
        heapq.heapreplace(free, free[0] + each)
    return sum(calls) / (rows * max(free))


class _CTranslate2:
    """Timings of CTranslate2 at all batch sizes, in a process without JAX's threads."""

    def __init__(self, target: str, inputs: Inputs, batch_sizes: Sequence[int]):
        self._folder = tempfile.TemporaryDirectory()
        copy = Path(self._folder.name) / "target"
        convert(target, copy, to="huggingface", dtype="float32")
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self.version = self._pool.submit(_load, str(copy)).result()
        self._ids = [ids for _, _, ids in inputs]
        self.seconds: dict[int, list[float]] = {size: [] for size in batch_sizes}
        self._outputs: list[list[int]] = []

    def time(self, *, keep: bool = False) -> None:
        length = NEUTRAL["max_decode_len"]
        for size, times in self.seconds.items():
            seconds, self._outputs = self._pool.submit(_translate, self._ids, length, size).result()
            if keep:
                times.append(seconds)

    def record(self, expected: list[list[int]]) -> dict[str, Any]:
        medians = {size: statistics.median(times) for size, times in self.seconds.items()}
        best = min(medians, key=medians.get)
        return {
            "version": self.version,
            "seconds": self.seconds,
            "batch_size": best,
            "tokens_per_second": sum(map(len, self._outputs)) / medians[best],
            "same_texts": sum(a == b for a, b in zip(self._outputs, expected, strict=True)),
        }

    def close(self) -> None:
        self._pool.shutdown()
        self._folder.cleanup()


def _load(checkpoint: str) -> str:
    global _translator
    version, _translator = implementations.translator_of(checkpoint, "float32", threads=2)
    return version


def _translate(inputs, max_tokens: int, batch_size: int) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    outputs = implementations.translated(_translator, inputs, max_tokens, batch_size)
    return time.perf_counter() - start, outputs


def table(values: Mapping[str, Any]) -> results.Table:
    """Makes a table with a line per batch size and gamma, from the result of ``measure``."""
    others = values["others"]
    best = max((other["tokens_per_second"] for other in others), default=None)

    def both(name: str, kind: str = "{:.2f}"):
        return lambda row: " → ".join(kind.format(row[name][way]) for way in ("batches", "slots"))

    columns = {
        "gamma": lambda row: str(row["gamma"]) if row["gamma"] else "plain",
        "batch": lambda row: str(row["batch_size"]),
        "tokens/s (batches → slots)": both("tokens_per_second", "{:,.0f}"),
        "slots / batches": lambda row: f"{row['ratio']:.2f}",
        "occupancy": both("occupancy"),
        "simulated": both("simulated"),
        "host": lambda row: f"{row['host_share']:.1%}",
        "to CTranslate2": lambda row: (
            f"{row['tokens_per_second']['slots'] / best:.2f}" if best else None
        ),
        "same answers": _same,
        "doubt": doubt,
    }
    rows = values["rows"]
    return results.table(columns, rows, *filter(None, [caution(rows)]))


def _same(row: Mapping[str, Any]) -> str:
    # Gamma auto varies with the timing, so answers' statistics differ even if texts are equal.
    if row["same_text"] and row["gamma"] == AUTO:
        return "texts"
    return "yes" if row["same_answers"] and row["same_text"] else "no"


if __name__ == "__main__":
    sys.exit(main())
