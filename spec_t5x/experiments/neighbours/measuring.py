"""Times all methods on the same inputs, in one run and in turn."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from spec_t5x.errors import InputError
from spec_t5x.experiments.floor import Floor, ReadMeter, decode_bytes, last_level_cache
from spec_t5x.experiments.neighbours.methods import Method, methods
from spec_t5x.experiments.neighbours.options import NeighboursOptions
from spec_t5x.experiments.neighbours.process import Process
from spec_t5x.experiments.neighbours.results import Alone, Divergence, Group, Row, Timings
from spec_t5x.experiments.neighbours.weights import Given
from spec_t5x.generation import bucket
from spec_t5x.types import PAD_ID

# ``tell(what)``, once for each thing that is done.
Tell = Callable[[str], None]


class MeasurementError(RuntimeError):
    """What worked before gave no answer, or our own decoding did not work: no result."""


@dataclasses.dataclass(kw_only=True)
class Lane:
    """A method that is ready in its process."""

    method: Method
    process: Process
    version: str
    # Sums over all inputs, a number for each repeat.
    decode_seconds: list[float] = dataclasses.field(default_factory=list)
    first_seconds: list[float] = dataclasses.field(default_factory=list)
    encoder_seconds: list[float | None] = dataclasses.field(default_factory=list)
    # Of the last repeat, for each input.
    outputs: list[list[int]] = dataclasses.field(default_factory=list)

    def decode(self, ids: list[int], max_tokens: int) -> tuple[float, list[int]]:
        """Seconds, and the output."""
        reply = self._ask("decode", ids=ids, max_tokens=max_tokens)
        return reply["seconds"], reply["ids"]

    def encode(self, ids: list[int]) -> float | None:
        """Seconds; None where it cannot be done."""
        return self._ask("encode", ids=ids)["seconds"]

    def margin(self, ids: list[int], prefix: list[int], first: int, second: int) -> float:
        """See ``ours.Decoder``."""
        tokens = {"prefix": prefix, "first": first, "second": second}
        return self._ask("margin", ids=ids, **tokens)["margin"]

    def add_repeat(self, turns: Sequence[tuple[list[int], float, float, float | None]]) -> None:
        """Adds what was measured for each input: output, whole, first token, encoder."""
        outputs, whole, beginning, encoder = zip(*turns, strict=True)
        self.outputs = list(outputs)
        self.decode_seconds.append(sum(whole))
        self.first_seconds.append(sum(beginning))
        self.encoder_seconds.append(None if None in encoder else sum(encoder))

    def timings(self, idle_share: float | None) -> Timings:
        """What all repeats took."""
        return Timings(
            decode=self.decode_seconds,
            first_token=self.first_seconds,
            encoder=None if None in self.encoder_seconds else self.encoder_seconds,
            idle_share=idle_share,
        )

    def _ask(self, do: str, **request: Any) -> dict[str, Any]:
        reply = self.process.ask(do, name=self.method.name, **request)
        if problem := _problem(reply):
            raise MeasurementError(f"{self.method.name}, {do}: {problem}")
        return reply


def measure(given: Given, options: NeighboursOptions, tell: Tell) -> Group:
    """All rows for one target.

    Each repeat decodes every input with every method, one right after the other, and the
    methods take turns in going first. The processes of the others wait meanwhile.

    Args:
      given: the target, its draft and its inputs.
      options: repeats and threads.
      tell: told of what is being done, ``num_steps`` times.

    Raises:
      InputError: a draft or verifier that cannot be used.
      MeasurementError: our own decoding did not work, or a method that was ready gave no answer.
    """
    trial = _Trial(given, options, tell)
    trial.prepare()
    trial.measure_alone()
    with contextlib.ExitStack() as stack:
        lanes = trial.warm_up(trial.open(stack))
        expected = trial.decode_plainly(lanes[0])
        lengths = [(len(ids), len(out)) for ids, out in zip(given.inputs, expected, strict=True)]
        reads = decode_bytes(given.config, lengths)
        meter = ReadMeter(reads.step, options.num_threads)
        stack.callback(meter.close)
        clock, bandwidths = _ProcessorClock(lanes), []
        for repeat in range(options.repeats):
            tell(f"decoding with all, {repeat + 1} of {options.repeats}")
            bandwidths.append(meter.bytes_per_second())
            trial.decode_in_turn(lanes, repeat, clock)
        rows = trial.make_rows(lanes, expected, clock.idle_shares())
    return Group(
        title=given.title,
        num_inputs=len(given.inputs),
        source_tokens=sum(map(len, given.inputs)),
        num_tokens=reads.num_tokens,
        max_decode_len=given.job.max_decode_len,
        alpha=given.job.alpha,
        floor=Floor(
            reads=reads,
            working_set=meter.num_bytes,
            last_level_cache=last_level_cache(),
            threads=options.num_threads,
            bytes_per_second=bandwidths,
        ),
        rows=rows,
    )


def num_steps(num_rows: int, options: NeighboursOptions) -> int:
    """How often ``measure`` tells of something."""
    return num_rows + 1 + options.repeats


class _Problems(dict[str, str]):
    """Why a method has no figures, by its name."""

    def note(self, method: Method, problem: str | None) -> bool:
        """Keeps a problem, if there is one; whether there is.

        Raises:
          MeasurementError: it is one of our own, without which there is nothing to show.
        """
        if problem is None:
            return False
        if method.module == "ours":
            raise MeasurementError(f"{method.name}: {problem}")
        self[method.name] = problem
        return True


def _problem(reply: dict[str, Any]) -> str | None:
    if "mistake" in reply:
        raise InputError(reply["mistake"])
    if "missing" in reply:
        return f"not installed: {reply['missing']}"
    return f"does not run: {reply['error']}" if "error" in reply else None


class _Trial:
    """One target's measurement, step by step, in the order of the methods."""

    def __init__(self, given: Given, options: NeighboursOptions, tell: Tell):
        self._given = given
        self._options = options
        self._tell = tell
        self._methods = methods(options, given.job)
        self._problems = _Problems({m.name: m.problem for m in self._methods if m.problem})
        self._alone: dict[str, Alone] = {}

    def prepare(self) -> None:
        """Lets libraries convert the weights, in a process that ends: it may take memory."""
        for module in dict.fromkeys(m.module for m in self._methods if m.prepares):
            with Process(self._options.num_threads) as process:
                job = dataclasses.asdict(self._given.job)
                problem = _problem(process.ask("prepare", module=module, job=job))
            for method in self._methods:
                if method.module == module:
                    self._problems.note(method, problem)

    def measure_alone(self) -> None:
        """Each method in a process of its own: compilation and memory."""
        for method in self._methods:
            self._tell(f"{method.name}, alone")
            if self._options.alone and method.name not in self._problems:
                with Process(self._options.num_threads) as process:
                    self._measure_alone(method, process)

    def _measure_alone(self, method: Method, process: Process) -> None:
        """Loads it and decodes the first input twice."""
        decode = {"do": "decode", "name": method.name, "ids": self._given.inputs[0]}
        decode["max_tokens"] = self._given.job.max_decode_len
        replies = []
        for request in (self._open_request(method), decode, decode, {"do": "peak"}):
            replies.append(process.ask(**request))
            if self._problems.note(method, _problem(replies[-1])):
                return
        opened, first, second, peak = replies
        self._alone[method.name] = Alone(
            load_seconds=opened["seconds"],
            compile_seconds=max(first["seconds"] - second["seconds"], 0.0),
            peak_bytes=peak["bytes"],
        )

    def open(self, stack: contextlib.ExitStack) -> list[Lane]:
        """A process for each group of methods, with all of them loaded."""
        processes, lanes = {}, []
        for method in self._methods:
            if method.name in self._problems:
                continue
            if method.process not in processes:
                process = stack.enter_context(Process(self._options.num_threads))
                processes[method.process] = process
            process = processes[method.process]
            reply = process.ask(**self._open_request(method))
            if not self._problems.note(method, _problem(reply)):
                lanes.append(Lane(method=method, process=process, version=reply["version"]))
        return lanes

    def _open_request(self, method: Method) -> dict[str, Any]:
        names = {"name": method.name, "module": method.module, "arguments": method.arguments}
        return {"do": "open", "job": dataclasses.asdict(self._given.job), **names}

    def warm_up(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Has every shape compiled that will come; those that can be used."""
        self._tell("compiling for all")
        job, ready = self._given.job, []
        shapes = {bucket(len(ids), job.max_source_len): ids for ids in self._given.inputs}
        for lane in lanes:
            try:
                for ids in shapes.values():
                    for max_tokens in (job.max_decode_len, 1):
                        lane.decode(ids, max_tokens)
                    lane.encode(ids)
                ready.append(lane)
            except MeasurementError as error:
                self._problems.note(lane.method, str(error))
        return ready

    def decode_plainly(self, plain: Lane) -> list[list[int]]:
        """The ids that all others are compared with."""
        length = self._given.job.max_decode_len
        return [plain.decode(ids, length)[1] for ids in self._given.inputs]

    def decode_in_turn(self, lanes: Sequence[Lane], repeat: int, clock: "_ProcessorClock") -> None:
        """Every input with every method; adds a repeat to what the lanes hold."""
        turns = {lane.method.name: [] for lane in lanes}
        for index, ids in enumerate(self._given.inputs):
            first = (repeat + index) % len(lanes)
            for lane in (*lanes[first:], *lanes[:first]):
                with clock.turn(lane):
                    whole, output = lane.decode(ids, self._given.job.max_decode_len)
                    beginning, _ = lane.decode(ids, 1)
                    encoder = lane.encode(ids)
                    time.sleep(self._options.settle_seconds)
                turns[lane.method.name].append((output, whole, beginning, encoder))
        for lane in lanes:
            lane.add_repeat(turns[lane.method.name])

    def make_rows(
        self, lanes: Sequence[Lane], expected: list[list[int]], shares: dict[str, float | None]
    ) -> list[Row]:
        """A row for each method, whatever became of it."""
        ready = {lane.method.name: lane for lane in lanes}
        rows = []
        for method in self._methods:
            common = {
                "name": method.name,
                "speculative": method.speculative,
                "exact": method.exact,
                "alone": self._alone.get(method.name),
            }
            lane = ready.get(method.name)
            if lane is None:
                rows.append(Row(**common, problem=self._problems[method.name]))
                continue
            drawn = method.speculative and self._given.job.alpha is not None
            divergences = [] if drawn else self._divergences(lanes[0], lane, expected)
            rows.append(
                Row(
                    **common,
                    version=lane.version,
                    timings=lane.timings(shares[method.process]),
                    num_tokens=sum(map(len, lane.outputs)),
                    identical=None if drawn else not divergences,
                    divergences=divergences,
                )
            )
        return rows

    def _divergences(self, plain: Lane, lane: Lane, expected: list[list[int]]) -> list[Divergence]:
        pairs = zip(self._given.inputs, expected, lane.outputs, strict=True)
        return [
            _divergence(plain, index, ids, ours, theirs)
            for index, (ids, ours, theirs) in enumerate(pairs)
            if ours != theirs
        ]


class _ProcessorClock:
    """Tells what processes did while it was not their turn: nothing, if all is well."""

    def __init__(self, lanes: Sequence[Lane]):
        self._processes = {lane.method.process: lane.process for lane in lanes}
        self._start = time.perf_counter()
        self._used = self._read()
        self._turns = dict.fromkeys(self._processes, 0.0)
        self._used_in_turns = dict.fromkeys(self._processes, 0.0)

    @contextlib.contextmanager
    def turn(self, lane: Lane):
        """The turn of a lane's process."""
        name = lane.method.process
        start, used = time.perf_counter(), lane.process.processor_seconds()
        yield
        self._turns[name] += time.perf_counter() - start
        if used is not None:
            self._used_in_turns[name] += lane.process.processor_seconds() - used

    def idle_shares(self) -> dict[str, float | None]:
        """Of each process, processor time over time, outside of its turns."""
        elapsed, used = time.perf_counter() - self._start, self._read()
        return {
            name: None
            if used[name] is None
            else (used[name] - self._used[name] - self._used_in_turns[name])
            / max(elapsed - self._turns[name], 1e-9)
            for name in self._processes
        }

    def _read(self) -> dict[str, float | None]:
        return {name: process.processor_seconds() for name, process in self._processes.items()}


def _divergence(
    plain: Lane, index: int, ids: list[int], ours: list[int], theirs: list[int]
) -> Divergence:
    """Where two outputs part, and by how little our target preferred its own."""
    pairs = list(zip([*ours, PAD_ID], [*theirs, PAD_ID], strict=False))
    position = next(place for place, (one, other) in enumerate(pairs) if one != other)
    first, second = pairs[position]
    return Divergence(
        input=index,
        position=position,
        plain_token=first,
        other_token=second,
        margin=plain.margin(ids, ours[:position], first, second),
    )
