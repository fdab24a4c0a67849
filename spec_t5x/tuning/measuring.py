"""What is measured on a device with a target, its drafts and a sample of inputs.

For each batch size, all in turn within one run (``interleaving.py``):

    T(m)     the target over m new tokens of each row, its caches half full
    D(g)     the draft's proposal of g tokens
    plain    whole texts decoded plainly, and the same with nothing to generate
    loop     whole texts decoded with the draft at a gamma or two, and with nothing to generate

The difference of a whole text and nothing to generate, by the steps taken, is what a step
takes in the loop; what the loop takes beyond its calls is its overhead. What is there
before the first token (the encoder, of the draft too; empty caches; dispatch) is the cost of
a batch, which users feel and Theorem 3.8 does not know.

Acceptance is taken once for each draft, from texts of all inputs (``traces.py``).
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.generation import Batch, GenerateOptions, Generator
from spec_t5x.interfaces import Draft
from spec_t5x.tuning.interleaving import Clock, Program, compiled, interleaved
from spec_t5x.tuning.options import TuningOptions
from spec_t5x.tuning.step_times import draft_calls, state_half_way, target_calls
from spec_t5x.tuning.traces import Trace, measure_trace
from spec_t5x.types import PAD_ID, Float, Int
from spec_t5x.verifiers import TreeVerifier, Verifier

# ``report(done, total, what)`` is told what is being measured.
Report = Callable[[int, int, str], None]
# Puts a batch on the devices that it is decoded on.
Place = Callable[[Batch], Batch]

# A tree grows with its depth; no call is made larger than this.
_MOST_NODES = 64
# Batches that are decoded whole.
_MOST_BATCHES = 4
# Rounds that a budget should be enough for.
_ROUNDS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTimes:
    """Seconds of one draft at one batch size."""

    gammas: tuple[int, ...]
    # Of a proposal of as many tokens.
    propose: Float[np.ndarray, "rounds gammas"]
    # Gammas that whole batches were decoded with; and their seconds, of set-up alone, too.
    probes: tuple[int, ...]
    decode: Float[np.ndarray, "rounds probes"]
    setup: Float[np.ndarray, "rounds probes"]
    # That these batches took, each until its last row ended.
    iterations: Int[np.ndarray, "probes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """Seconds at one batch size, of one run: the same rounds in all fields."""

    batch_size: int
    # Tokens of each row in one call.
    widths: tuple[int, ...]
    target: Float[np.ndarray, "rounds widths"]
    # The inputs of each batch that is decoded whole, by their places in the sample.
    inputs: tuple[tuple[int, ...], ...]
    # Of all these batches, plainly decoded, and of their set-up alone.
    plain: Float[np.ndarray, "rounds"]
    plain_setup: Float[np.ndarray, "rounds"]
    # That they took, each until its last row ended.
    steps: int
    drafts: Mapping[str, DraftTimes]
    # Of all programs together, not counted above.
    compile_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """All that predictions are made of."""

    # By batch size.
    times: Mapping[int, BatchTimes]
    # By draft.
    traces: Mapping[str, Trace]
    # Drafts that propose fewer than gamma tokens at times.
    varying: frozenset[str]
    verifier: Verifier | TreeVerifier

    @property
    def num_inputs(self) -> int:
        """Of the sample."""
        return len(next(iter(self.traces.values())).rows)

    @property
    def max_gamma(self) -> int:
        """The largest that acceptance is known for."""
        return min(trace.gamma for trace in self.traces.values())


def measure(
    generator: Generator,
    drafts: Mapping[str, Draft],
    texts: Sequence[str],
    options: GenerateOptions,
    *,
    batch_sizes: Sequence[int],
    tuning: TuningOptions,
    place: Place = lambda batch: batch,
    report: Report | None = None,
    clock: Clock = time.perf_counter,
) -> Measurement:
    """Measures drafts on a sample of inputs.

    Args:
      generator: the target.
      drafts: by name.
      texts: the sample, of which the first ``tuning.num_inputs`` are taken.
      options: how to decode; gamma, guard and batch size are of no account.
      batch_sizes: those to measure.
      tuning: how much to measure.
      place: where batches go, if not to JAX's default device.
      report: hears of the progress.
      clock: seconds from any time on.

    Raises:
      InputError: nothing to measure, or an input that cannot be decoded.
    """
    if not drafts or not texts:
        raise InputError("nothing to measure: give at least one draft and one input")
    texts = list(texts)[: tuning.num_inputs]
    verifier = options.make_verifier()
    largest = _largest_gamma(verifier, tuning.max_gamma)
    report = report or (lambda done, total, what: None)
    total = len(drafts) + len(batch_sizes)
    together = dataclasses.replace(options, batch_size=max(batch_sizes), gamma=largest, guard=False)
    sample = [place(batch) for batch in of_one_shape(generator.batches(texts, together))]
    traces = {}
    for name, draft in drafts.items():
        report(len(traces), total, f"acceptance of {name}")
        traces[name] = measure_trace(generator.with_draft(draft), sample, together, largest)
    times = {}
    for size in batch_sizes:
        report(len(drafts) + len(times), total, f"times at batch size {size}")
        sized = dataclasses.replace(together, batch_size=size)
        timer = _Timer(generator, drafts, sized, tuning, clock, place, traces)
        times[size] = timer.measure(texts)
    return Measurement(
        times=times,
        traces=traces,
        varying=frozenset(name for name, draft in drafts.items() if draft.varies),
        verifier=verifier,
    )


@dataclasses.dataclass(frozen=True)
class _Timer:
    """Times one batch size."""

    generator: Generator
    drafts: Mapping[str, Draft]
    # With the largest gamma, and the batch size.
    options: GenerateOptions
    tuning: TuningOptions
    clock: Clock
    place: Place
    traces: Mapping[str, Trace]

    def measure(self, texts: Sequence[str]) -> BatchTimes:
        num = 1 + len(self.drafts)
        batches, places = alike(
            self.generator, texts, self.options, self.tuning.budget / num, self.place, self.clock
        )
        programs, keys = self._programs(batches)
        programs, compile_seconds = compiled(programs, self.clock)
        rounds = interleaved(programs, budget=self.tuning.budget, clock=self.clock)
        column = dict(zip(keys, rounds.T, strict=True))
        widths = tuple(key[1] for key in keys if key[0] == "target")
        return BatchTimes(
            batch_size=self.options.batch_size,
            widths=widths,
            target=np.stack([column["target", width] for width in widths], axis=1),
            inputs=tuple(places),
            plain=column["decode", None, 0],
            plain_setup=column["setup", None, 0],
            steps=sum(_steps(self.generator.plain(), batch, self.options) for batch in batches),
            drafts={name: self._draft_times(name, batches, column) for name in self.drafts},
            compile_seconds=compile_seconds,
        )

    def _draft_times(self, name: str, batches: Sequence[Batch], column) -> DraftTimes:
        gammas, probes = self._gammas(()), self._probes()
        generator = self.generator.with_draft(self.drafts[name])
        steps = [
            sum(_steps(generator, batch, self._with(probe)) for batch in batches)
            for probe in probes
        ]

        def columns(what: str, of: Sequence[int]) -> np.ndarray:
            return np.stack([column[what, name, gamma] for gamma in of], axis=1)

        return DraftTimes(
            gammas=gammas,
            propose=columns("propose", gammas),
            probes=probes,
            decode=columns("decode", probes),
            setup=columns("setup", probes),
            iterations=np.asarray(steps, np.int64),
        )

    def _programs(self, batches: Sequence[Batch]) -> tuple[list[Program], list[tuple]]:
        """What is timed in turn, and a key for each."""
        programs = dict(self._calls(batches[0]))
        loops = [(None, 0), *((name, probe) for name in self.drafts for probe in self._probes())]
        for name, gamma in loops:
            draft = None if name is None else self.drafts[name]
            which, options = self.generator.with_draft(draft), self._with(gamma)
            for key, kept in (("decode", batches), ("setup", [_nothing(b) for b in batches])):
                programs[key, name, gamma] = Program.once(decoding(which, kept, options))
        return list(programs.values()), list(programs)

    def _calls(self, batch: Batch):
        """Single calls of the target and of each draft."""
        target, verifier = self.generator.target, self.options.make_verifier()
        lengths = [row.length for t in self.traces.values() for group in t.rows for row in group]
        inputs = jnp.repeat(batch.tokens, self.options.num_decodes, axis=0)
        states = {
            name: state_half_way(
                target,
                draft,
                inputs,
                gamma=self.options.gamma,
                max_decode_len=batch.prompts.shape[1] - 1 + self.options.max_decode_len,
                verifier=verifier,
                length=max(round(np.mean(lengths) / 2), 1),
            )
            for name, draft in self.drafts.items()
        }
        cache = next(iter(states.values())).target_cache
        gammas = self._gammas(self.tuning.timed_gammas)
        for width in (1, *(verifier.num_nodes(gamma) for gamma in gammas)):
            yield ("target", width), Program(run=target_calls(target, cache, new=width))
        for name, draft in self.drafts.items():
            for gamma in self._gammas(()):
                calls = draft_calls(
                    draft, states[name], self.options.sampling(), gamma=gamma, verifier=verifier
                )
                yield ("propose", name, gamma), Program(run=calls)

    def _gammas(self, more: Sequence[int]) -> tuple[int, ...]:
        """Those that are timed; in between lies a straight line."""
        largest = self.options.gamma
        wanted = (1, *self._probes(), *more, largest)
        return tuple(sorted({min(gamma, largest) for gamma in wanted}))

    def _probes(self) -> tuple[int, ...]:
        return tuple(sorted({min(gamma, self.options.gamma) for gamma in self.tuning.probes}))

    def _with(self, gamma: int) -> GenerateOptions:
        return dataclasses.replace(self.options, gamma=gamma)


def alike(
    generator: Generator,
    texts: Sequence[str],
    options: GenerateOptions,
    budget: float,
    place: Place,
    clock: Clock,
) -> tuple[list[Batch], list[tuple[int, ...]]]:
    """Batches of the shape that most of them have, and the places of their inputs.

    As many as can be decoded plainly several times over in ``budget`` seconds, at least one.
    """
    batches, size = generator.batches(texts, options), options.batch_size
    places = [tuple(range(i, min(i + size, len(texts)))) for i in range(0, len(texts), size)]
    ((shape, _),) = Counter(_shape(batch) for batch in batches).most_common(1)
    of_shape = [pair for pair in zip(batches, places, strict=True) if _shape(pair[0]) == shape]
    of_shape = [(place(batch), inputs) for batch, inputs in of_shape[:_MOST_BATCHES]]
    one = Program.once(decoding(generator.plain(), [of_shape[0][0]], options))
    # Compiled in the first run.
    seconds = [one.seconds(clock) for _ in range(2)][1]
    chosen = of_shape[: max(int(budget / _ROUNDS / max(seconds, 1e-9)), 1)]
    return [batch for batch, _ in chosen], [inputs for _, inputs in chosen]


def confirm(
    generator: Generator,
    texts: Sequence[str],
    options: GenerateOptions,
    *,
    budget: float,
    place: Place = lambda batch: batch,
    clock: Clock = time.perf_counter,
) -> float:
    """The speed-up of a generator with a draft over itself without one, measured in turn.

    Args:
      generator: with a draft, and a guard where the options ask for one.
      texts: the sample.
      options: with the gamma to confirm.
      budget: seconds of timing.
      place, clock: as of ``measure``.

    Returns:
      The median of the factors of each round, set-up included.
    """
    batches, _ = alike(generator, texts, options, budget / 2, place, clock)
    programs = [
        Program.once(decoding(which, batches, options)) for which in (generator.plain(), generator)
    ]
    rounds = interleaved(programs, budget=budget, least=5, clock=clock)
    return float(np.median(rounds[:, 0] / rounds[:, 1]))


def _shape(batch: Batch) -> tuple:
    return batch.tokens.shape, batch.prompts.shape


def decoding(
    generator: Generator, batches: Sequence[Batch], options: GenerateOptions
) -> Callable[[], None]:
    """Decodes batches one after the other, as commands do."""

    def run() -> None:
        for batch in batches:
            jax.block_until_ready(generator.decode(batch, options))

    return run


def _nothing(batch: Batch) -> Batch:
    """The same batch with nothing to generate."""
    return dataclasses.replace(batch, max_decode_steps=np.zeros_like(batch.max_decode_steps))


def _steps(generator: Generator, batch: Batch, options: GenerateOptions) -> int:
    """Iterations, or plain steps, until the last row of a batch has ended."""
    decoded = jax.device_get(generator.decode(batch, options))
    if decoded.stats is not None:
        return int(decoded.stats.target_calls.max())
    prompts = np.count_nonzero(np.asarray(batch.prompts)[:, 1:] != PAD_ID, axis=1)
    return int((decoded.lengths - prompts[:, None]).max())


def of_one_shape(batches: Sequence[Batch]) -> list[Batch]:
    """The batches, padded to the widest of them: one program for all."""
    sources, prompts = (
        max(getattr(batch, name).shape[1] for batch in batches) for name in ("tokens", "prompts")
    )
    return [
        dataclasses.replace(
            batch, tokens=_wide(batch.tokens, sources), prompts=_wide(batch.prompts, prompts)
        )
        for batch in batches
    ]


def _wide(tokens: np.ndarray, width: int) -> np.ndarray:
    missing = width - tokens.shape[1]
    return np.pad(tokens, ((0, 0), (0, missing)), constant_values=PAD_ID)


def _largest_gamma(verifier: Verifier | TreeVerifier, max_gamma: int) -> int:
    """The largest gamma whose verification is no larger than is sensible."""
    for gamma in range(max_gamma, 1, -1):
        try:
            if verifier.num_nodes(gamma) <= _MOST_NODES:
                return gamma
        except InputError:
            # A tree that is too large.
            continue
    return 1
