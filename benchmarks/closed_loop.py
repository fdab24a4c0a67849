"""Measures a closed loop: a client sends its next request when its last one is answered.

    python -m benchmarks.closed_loop --target random:t5_1_1_xl --draft random:t5_1_1_small \\
        --alpha 0.75 --requests 1024 --concurrency 8 32 64 --json closed_loop.json

Each of the clients has a row of the batch. In static batches all of them wait for the slowest row;
in slots a request is answered when its row ends, and its client's next one, encoded alone, takes
the row. The latency of a request is the time from sending to answer. Weights and sources are
random, lengths of outputs are drawn from a quarter of ``--max_decode_len`` to all of it, and with a
draft the acceptances are simulated (``labs/benchmark/simulated_acceptance.py``). Both ways decode
the same requests; in slots, further requests keep all rows busy until the last of these is
answered.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import command, random_pair
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError, check_at_least, check_numbers
from spec_t5x.interfaces import Draft, Target
from spec_t5x.labs.benchmark import results
from spec_t5x.labs.benchmark.random_models import random_sources
from spec_t5x.labs.benchmark.reliability import OtherPrograms, caution, doubt
from spec_t5x.labs.benchmark.simulated_acceptance import SimulatedVerifier
from spec_t5x.loops import refill
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.decode_state import Loop
from spec_t5x.loops.outputs import row_keys
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.names import MOST_SEED
from spec_t5x.sampling.distributions import sampling
from spec_t5x.tuning.timed_calls import NO_EOS

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class Requests:
    """Requests in the order of sending."""

    sources: np.ndarray  # [requests, source] int32
    keys: jax.Array  # [requests] keys
    lengths: np.ndarray  # [requests] int32, tokens of each output

    @classmethod
    def drawn(cls, target: Target, number: int, source_len: int, longest: int, seed: int):
        """Draws sources, keys and lengths."""
        draw = np.random.default_rng(seed).integers
        return cls(
            sources=random_sources(target, number, source_len, seed),
            keys=row_keys(jax.random.key(seed), number),
            lengths=draw(max(longest // 4, 1), longest, number, np.int32, endpoint=True),
        )

    def rows(self, places: Sequence[int], rows: int) -> tuple:
        """Returns sources, prompts, keys, lengths and numbers of requests, padded to ``rows``."""
        padded = np.zeros(rows, np.int64)
        padded[: len(places)] = places
        given = np.arange(rows) < len(places)
        numbers = np.where(given, padded, refill.EMPTY_SLOT).astype(np.int32)
        # Requests beyond those that were drawn repeat the first ones.
        padded %= len(self.lengths)
        lengths = np.where(given, self.lengths[padded], 0).astype(np.int32)
        prompts = np.zeros((rows, 1), np.int32)
        return self.sources[padded], prompts, self.keys[padded], lengths, numbers


class Answers:
    """Times of sending, and the answers to the first ``number`` requests."""

    def __init__(self, number: int):
        self.number, self.sent = number, {}
        self.latencies: dict[int, float] = {}
        self.outputs: dict[int, bytes] = {}
        self.start = time.perf_counter()

    def send(self, places: Sequence[int]) -> None:
        """Notes that requests are sent now."""
        self.sent |= dict.fromkeys(places, time.perf_counter())

    def receive(self, place: int, tokens: np.ndarray) -> None:
        """Notes that a request is answered now."""
        if place < self.number:
            self.latencies[place] = time.perf_counter() - self.sent[place]
            self.outputs[place] = tokens.tobytes()

    @property
    def is_complete(self) -> bool:
        """True if all of the first ``number`` requests are answered."""
        return len(self.latencies) == self.number


class Server:
    """Models that answer requests, plainly or with a draft, in static batches or in slots."""

    def __init__(self, target: Target, draft: Draft | None, rows: int, loop: Loop):
        self.target, self.draft, self.rows, self.loop = target, draft, rows, loop
        self.settings = sampling()

    def answer_in_batches(self, requests: Requests, number: int) -> Answers:
        """Answers the first ``number`` requests; all rows of a batch end with the slowest."""
        answers, options = Answers(number), dataclasses.asdict(self.loop)
        options |= {"verifier": self.loop.verifier}
        decode, models = speculative_decode, (self.target, self.draft)
        if self.draft is None:
            decode, models = autoregressive_decode, (self.target,)
            del options["gamma"], options["verifier"]
        for first in range(0, number, self.rows):
            places = range(first, min(first + self.rows, number))
            answers.send(places)
            *inputs, lengths, _ = requests.rows(places, self.rows)
            decoded = decode(*models, *inputs, self.settings, max_decode_steps=lengths, **options)
            tokens = jax.device_get(decoded.tokens)
            for row, place in enumerate(places):
                answers.receive(place, tokens[row])
        return answers

    def answer_in_slots(self, requests: Requests, number: int) -> Answers:
        """Answers requests in slots until the first ``number`` of them are answered."""
        answers, waiting = Answers(number), itertools.count(self.rows)
        answers.send(range(self.rows))
        slots = refill.fill(self._encoded(requests, range(self.rows), self.rows, waits=False))
        free: list[int] = []
        while not answers.is_complete:
            group = self._encoded(requests, free[:1], 1, waits=True)
            del free[:1]
            slots, ended = refill.burst(
                *(self.target, self.draft, slots, group, self.settings, np.bool_(False)),
                loop=self.loop,
            )
            places, tokens = jax.device_get((ended.places, ended.decoded.tokens))
            for row in np.flatnonzero(places != refill.EMPTY_SLOT):
                answers.receive(int(places[row]), tokens[row])
                free.append(next(waiting))
                answers.send(free[-1:])
        return answers

    def _encoded(self, requests: Requests, places: Sequence[int], rows: int, *, waits: bool):
        inputs = requests.rows(places, rows)
        members = refill.prepare(
            *(self.target, self.draft, *inputs), loop=self.loop, paced=False, waits=waits
        )
        # Places stay on the host, as in ``burst``: another sharding would be another program.
        return members.replace(places=inputs[-1]) if waits else members


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, writes JSON if asked to; returns 0, or 2 on an input error."""
    parser = command.parser("closed_loop", __doc__)
    random_pair.add_options(parser)
    add = parser.add_argument
    add("--target", default="random:t5_1_1_xl", help="random:SIZE (random:t5_1_1_xl)")
    add("--draft", default="random:t5_1_1_small", help="random:SIZE (random:t5_1_1_small)")
    add("--requests", type=int, default=1024, help="requests to answer (1024)")
    add("--concurrency", nargs="+", type=int, default=[8, 32, 64], help="clients (8 32 64)")
    add("--source_len", type=int, default=400, help="tokens of a source (400)")
    add("--max_decode_len", type=int, default=128, help="tokens of the longest output (128)")
    add("--seed", type=int, default=0, help="seed of weights, sources and lengths (0)")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    return command.run_timed(parser, arguments, measure, table)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the figures of each concurrency, gamma and way, as JSON values.

    Raises:
      InputError: a number below 1, a gamma or seed below 0, a seed of more than 32 bits, an unknown
        size, or too little memory.
    """
    check_at_least(args, requests=1, source_len=1, max_decode_len=1)
    check_numbers(0, MOST_SEED, seed=args.seed)
    if min(*args.concurrency, args.requests) < 1 or min(args.gamma) < 0:
        raise InputError(
            f"concurrency is {args.concurrency} and gamma {args.gamma}: give at least 1 client "
            "and 0 drafts"
        )
    names = (name.removeprefix("random:") for name in (args.target, args.draft))
    target, model = random_pair.make(*names, args, args.seed)
    draft = TransformerDraft(model)
    for rows, gamma in itertools.product(args.concurrency, args.gamma):
        requests = Requests.drawn(
            target, args.requests + rows, args.source_len, args.max_decode_len, args.seed
        )
        loop = Loop(
            gamma=gamma,
            max_decode_len=args.max_decode_len,
            verifier=SimulatedVerifier(alpha=args.alpha),
            eos_id=NO_EOS,
        )
        server = Server(target, draft if gamma else None, rows, loop)
        yield from _ways(server, requests, args.requests)
        # Compiled programs of earlier rows are not used again and take memory.
        jax.clear_caches()


def _ways(server: Server, requests: Requests, number: int) -> Iterator[dict[str, Any]]:
    """Yields the figures of static batches, then of slots."""
    outputs = None
    for way in ("batches", "slots"):
        answer = getattr(server, f"answer_in_{way}")
        start = time.perf_counter()
        # Not kept: it compiles.
        answer(requests, min(number, server.rows + 1))
        first, others = time.perf_counter() - start, OtherPrograms()
        answers = answer(requests, number)
        seconds = time.perf_counter() - answers.start
        tokens = int(requests.lengths[:number].sum())
        latencies = np.percentile(list(answers.latencies.values()), PERCENTILES)
        outputs = outputs or answers.outputs
        yield {
            "concurrency": server.rows,
            "gamma": server.loop.gamma,
            "way": way,
            "requests": number,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "latency_seconds": dict(zip(PERCENTILES, latencies, strict=True)),
            # Of few requests, compilation included.
            "first_seconds": first,
            "same_outputs": sum(outputs[place] == answers.outputs[place] for place in outputs),
            "beside": others.share,
        }


def table(rows: Sequence[dict[str, Any]]) -> results.Table:
    """Makes a table with a line for each concurrency, gamma and way."""

    def latency(percentile: int):
        return lambda row: f"{row['latency_seconds'][percentile]:.2f}"

    columns = {
        "clients": lambda row: str(row["concurrency"]),
        "gamma": lambda row: str(row["gamma"]) if row["gamma"] else "plain",
        "rows": lambda row: row["way"],
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        **{f"latency, p{each}, s": latency(each) for each in PERCENTILES},
        "same outputs": lambda row: f"{row['same_outputs']} of {row['requests']}",
        "doubt": doubt,
    }
    return results.table(columns, rows, *filter(None, [caution(rows)]))


if __name__ == "__main__":
    sys.exit(main())
