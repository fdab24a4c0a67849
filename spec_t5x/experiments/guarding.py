"""What a hopeless draft costs, with the guard and without it; and what the guard costs a good one.

Adversarial drafts are those of which nothing is ever accepted: random tokens, and networks
with random weights as large as the run's own draft and as large as the target. Each decodes
the same inputs as plain decoding does, in one process and in turn, compilation apart:

* without the guard;
* with it, its balance carried from batch to batch, as a run of many inputs does;
* with a new one for each batch, as if each batch were all there is.

The guard works with costs measured at the start, the prefill of the draft included.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.checkpoints.drafts import make_draft
from spec_t5x.checkpoints.loading import load
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.drafts.uniform import UniformDraft
from spec_t5x.errors import InputError
from spec_t5x.experiments.inputs import InputOptions, generator_of, read_texts
from spec_t5x.experiments.synthetic_acceptance import random_model
from spec_t5x.generation import Batch, GenerateOptions, Generator
from spec_t5x.guard import Guard, guard
from spec_t5x.interfaces import Draft
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.outputs import Decoded
from spec_t5x.tuning.measuring import of_one_shape
from spec_t5x.tuning.step_times import measure_step_times
from spec_t5x.types import PAD_ID

HELP = "what a hopeless draft costs"

# Timings that a guard's costs are medians of; a set-up is short, and so are its whims long.
_COSTS_REPEATS = 3
_SETUPS = 7
# Names of drafts.
OWN, UNIFORM, RANDOM, AS_TARGET = "own", "uniform", "random", "as_target"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardingOptions(InputOptions):
    """What to decode, and with which drafts."""

    # The first that the encoder takes; of a task, the first, without what it refuses.
    num_inputs: int = 20
    # Of all inputs, each way.
    repeats: int = 5
    # ``own`` is the run's, ``uniform`` any token, ``random`` a network as large as the run's
    # own draft, ``as_target`` one as large as the target, both with random weights.
    drafts: tuple = (UNIFORM, RANDOM, AS_TARGET, OWN)
    # The guard's (``guard.guard``).
    tolerance: float = 0.05
    start: float = 2.0
    limit: float = 8.0
    seed: int = 0

    def __post_init__(self):
        self.check_given()
        for name in ("num_inputs", "repeats"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)!r}: give at least 1")
        known = (OWN, UNIFORM, RANDOM, AS_TARGET)
        for draft in self.drafts:
            if draft not in known:
                raise InputError(f"draft is {draft!r}: choose from {', '.join(known)}")
        self.make_guard(c=0.0, verification=1.0, prefill=0.0)

    def make_guard(self, *, c: float, verification: float, prefill: float) -> Guard:
        """A guard with these settings."""
        return guard(
            c=c,
            verification=verification,
            prefill=prefill,
            tolerance=self.tolerance,
            start=self.start,
            limit=self.limit,
        )


# As the command knows it (``cli.benchmark``).
Options = GuardingOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One draft. Seconds are those of all inputs, of every repeat."""

    draft: str
    gamma: int
    temperature: float
    batch_size: int
    # Of plain decoding.
    num_tokens: int
    # Of the guard, in target steps.
    c: float
    verification: float
    prefill: float
    # Generated tokens for each target call without the guard.
    block_efficiency: float
    # Target calls that were plain steps, of all.
    plain_share: float
    plain_share_alone: float
    plain_seconds: list[float]
    unguarded_seconds: list[float]
    guarded_seconds: list[float]
    # With a new guard for each batch.
    alone_seconds: list[float]

    @property
    def iteration(self) -> float:
        """Of an iteration, in target steps."""
        return self.gamma * self.c + self.verification

    def cost(self, seconds: Sequence[float]) -> float:
        """Time over that of plain decoding, medians of both."""
        return statistics.median(seconds) / statistics.median(self.plain_seconds)

    def to_dict(self) -> dict[str, Any]:
        """All of it, with the ratios."""
        return dataclasses.asdict(self) | {
            "unguarded": self.cost(self.unguarded_seconds),
            "guarded": self.cost(self.guarded_seconds),
            "guarded_alone": self.cost(self.alone_seconds),
        }


def run(
    options: GuardingOptions,
    report: Callable[[int, int, str], None] | None = None,
    *,
    models: Any,
    decoding: GenerateOptions | None = None,
) -> Iterator[Row]:
    """Measures draft after draft.

    Args:
      options: what to decode.
      report: ``report(done, total, what)`` is told of each draft.
      models: the target and its draft (``cli.settings.Models``).
      decoding: gamma, temperature, lengths, the batch's size.

    Raises:
      InputError: nothing to decode, plain decoding or a beam search asked for, or random
        weights in the sizes of what is no T5.
    """
    decoding = dataclasses.replace(decoding or GenerateOptions(), guard=False)
    if decoding.beams or not isinstance(decoding.gamma, int) or decoding.gamma == 0:
        raise InputError(
            f"beams is {decoding.beams} and gamma {decoding.gamma}: a guard is for drafts, leave "
            "beams 0 and give a gamma from 1"
        )
    draft_options = models.draft_options()
    target = load(models.target, dtype=draft_options.dtype, vocabulary=models.vocabulary)
    generator = generator_of(target)
    texts = read_texts(options, generator, decoding, options.num_inputs)
    batches = of_one_shape(generator.batches(texts, decoding))
    own = make_draft(models.draft_name(), target, generator.target, draft_options)
    for done, name in enumerate(options.drafts):
        if report:
            report(done, len(options.drafts), f"draft {name}")
        draft = _draft(name, own, generator.target, options.seed)
        yield _measure(name, generator.with_draft(draft), batches, decoding, options)


def _draft(name: str, own: Draft, target, seed: int) -> Draft:
    if name == OWN:
        return own
    if name == UNIFORM:
        return UniformDraft(target.vocab_size)
    model = target if name == AS_TARGET else getattr(own, "model", None)
    if not isinstance(model, T5Model):
        raise InputError(
            f"draft is {name!r} and {type(own).__name__} drafts for {type(target).__name__}: "
            "random weights need the sizes of a T5"
        )
    config = model.config
    return TransformerDraft(random_model(config, config.dtype, seed))


def _measure(
    name: str,
    generator: Generator,
    batches: list[Batch],
    decoding: GenerateOptions,
    options: GuardingOptions,
) -> Row:
    plain = generator.plain()
    costs = _costs(generator, batches, decoding)
    fresh = options.make_guard(**costs)
    guarded = dataclasses.replace(generator, guard=fresh)
    with_guard = dataclasses.replace(decoding, guard=True)
    # Compiled.
    _timed(guarded, batches[0], with_guard)
    seconds, last = [], None
    for _ in range(options.repeats):
        now, sums = fresh, np.zeros(4)
        last = ([], [], [], [])
        for batch in batches:
            runs = [
                _timed(plain, batch, decoding),
                _timed(generator, batch, decoding),
                _timed(guarded, batch, with_guard, now),
                _timed(guarded, batch, with_guard, fresh),
            ]
            now = runs[2][1].guard
            sums += [run[0] for run in runs]
            for kept, run in zip(last, runs, strict=True):
                kept.append(run[1])
        seconds.append(sums.tolist())
    plain_seconds, unguarded, with_balance, alone = map(list, zip(*seconds, strict=True))
    plain_texts, unguarded_texts, guarded_texts, alone_texts = last
    return Row(
        draft=name,
        gamma=decoding.gamma,
        temperature=decoding.temperature,
        batch_size=decoding.batch_size,
        num_tokens=sum(int(np.sum(n)) for n in map(_generated, batches, plain_texts)),
        **costs,
        block_efficiency=_total(unguarded_texts, "appended")
        / _total(unguarded_texts, "target_calls"),
        plain_share=_total(guarded_texts, "plain_steps") / _total(guarded_texts, "target_calls"),
        plain_share_alone=_total(alone_texts, "plain_steps") / _total(alone_texts, "target_calls"),
        plain_seconds=plain_seconds,
        unguarded_seconds=unguarded,
        guarded_seconds=with_balance,
        alone_seconds=alone,
    )


def _costs(generator: Generator, batches: list[Batch], decoding: GenerateOptions) -> dict:
    """A guard's costs, from decoding itself: steps beside one another, set-up apart.

    What an iteration takes beyond its drafts counts as verification, whatever it is.
    """
    ways, seconds = (generator.plain(), generator), []
    nothing = dataclasses.replace(
        batches[0], max_decode_steps=np.zeros_like(batches[0].max_decode_steps)
    )
    for number in range(_COSTS_REPEATS + 1):
        setups = [[_timed(which, nothing, decoding)[0] for which in ways] for _ in range(_SETUPS)]
        runs = [[_timed(which, batch, decoding) for which in ways] for batch in batches]
        if number:
            # The first time was for compiling.
            decodes = np.sum([[r[0] for r in run] for run in runs], axis=0)
            seconds.append([*np.median(setups, axis=0), *decodes])
    medians = np.median(seconds, axis=0)
    loops = np.maximum(medians[2:] - len(batches) * medians[:2], 1e-9)
    steps = [
        sum(int(np.max(n)) for n in map(_generated, batches, [plain for (_, plain), _ in runs])),
        sum(int(np.max(decoded.stats.target_calls)) for _, (_, decoded) in runs),
    ]
    plain_step, iteration = loops / steps
    times = measure_step_times(
        generator.target,
        generator.draft,
        jnp.asarray(batches[0].tokens),
        gamma=decoding.gamma,
        max_decode_len=decoding.max_decode_len,
        settings=decoding.sampling(),
        verifier=decoding.make_verifier(),
        repeats=_COSTS_REPEATS,
    )
    c = 1e-3 * times.draft / plain_step
    return {
        "c": float(c),
        "verification": float(max(iteration / plain_step - decoding.gamma * c, 1.0)),
        "prefill": float(max(medians[1] - medians[0], 0.0) / plain_step),
    }


def _timed(generator: Generator, batch: Batch, options: GenerateOptions, guard=None):
    start = time.perf_counter()
    decoded = jax.block_until_ready(generator.decode(batch, options, guard))
    return time.perf_counter() - start, decoded


def _generated(batch: Batch, decoded: Decoded) -> np.ndarray:
    """Tokens of each row, without its prompt's."""
    prompts = np.count_nonzero(np.asarray(batch.prompts)[:, 1:] != PAD_ID, axis=1)
    return np.asarray(decoded.lengths) - prompts[:, None]


def _total(texts, field: str) -> int:
    return sum(int(np.sum(getattr(decoded.stats, field))) for decoded in texts)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| draft | c | iteration¹ | prefill² | block efficiency³ | without guard | with guard "
        "| plain steps | a guard for each batch⁴ | plain steps |",
        "|" + "---|" * 10,
    ]
    for row in rows:
        lines.append(
            f"| {row.draft} | {row.c:.3f} | {row.iteration:.2f} | {row.prefill:.2f} "
            f"| {row.block_efficiency:.2f} | {row.cost(row.unguarded_seconds):.3f} "
            f"| {row.cost(row.guarded_seconds):.3f} | {row.plain_share:.0%} "
            f"| {row.cost(row.alone_seconds):.3f} | {row.plain_share_alone:.0%} |"
        )
    row = rows[0]
    lines += [
        "",
        f"Time over plain decoding's, medians of {len(row.plain_seconds)} runs over "
        f"{row.num_tokens} tokens; gamma {row.gamma}, temperature {row.temperature:g}, batch "
        f"{row.batch_size}. ¹ Steps of plain decoding that an iteration takes. ² Of the draft, for "
        "each batch, in the same unit. ³ Without guard. ⁴ Nothing is carried from one batch to "
        "the next.",
    ]
    return "\n".join(lines)


def to_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """What JSON can hold."""
    return {"rows": [row.to_dict() for row in rows]}
