"""What the default is worth: gamma "auto" beside plain decoding and fixed gammas.

Good drafts and hopeless ones, at several batch sizes, all ways of decoding in turn, batch by
batch, compilation apart. What speculation costs is measured before and not counted, as it is
remembered; how much is accepted is learned anew in every repeat, and the time of that counts.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import make_draft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.experiments.inputs import InputOptions, generator_of, read_texts, without_folder
from spec_t5x.experiments.synthetic_acceptance import random_model
from spec_t5x.generation import AUTO, Batch, GenerateOptions, Generator, Run
from spec_t5x.interfaces import Draft
from spec_t5x.models.seq2seq import T5Model

HELP = "what gamma auto is worth, with good drafts and hopeless ones"

# The run's own draft, and a network in its sizes with random weights.
OWN, RANDOM = "own", "random"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PacingOptions(InputOptions):
    """What to decode, and with which drafts."""

    # The first that the encoder takes; of a task, the first, without what it refuses.
    num_inputs: int = 100
    # Of all inputs, each way.
    repeats: int = 3
    # ``own`` is the run's, ``random`` as large and of random weights; others as --draft.
    drafts: tuple = (OWN, "copy", "uniform", RANDOM)
    batch_sizes: tuple = (1, 8, 32)
    # Fixed ones, beside "auto" and plain decoding.
    gammas: tuple = (2, 4)
    seed: int = 0

    def __post_init__(self):
        self.check_given()
        for name in ("num_inputs", "repeats"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)!r}: give at least 1")
        for gamma in self.gammas:
            if not isinstance(gamma, int) or gamma < 1:
                raise InputError(f"gammas hold {gamma!r}: give whole numbers from 1")


# As the command knows it (``cli.benchmark``).
Options = PacingOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One draft at one batch size. Seconds are those of all inputs, of every repeat."""

    draft: str
    batch_size: int
    temperature: float
    # Of an iteration with 0, 1, … drafts, and of the draft's prefill, in plain steps.
    costs: tuple[float, ...]
    prefill: float
    # Share of steps without drafts, and drafts of an iteration.
    plain_share: float
    limit: float
    plain_seconds: list[float]
    auto_seconds: list[float]
    # By gamma.
    fixed_seconds: dict[int, list[float]]

    def speed_up(self, seconds: Sequence[float]) -> float:
        """Of plain decoding's time over this, medians of both."""
        return statistics.median(self.plain_seconds) / statistics.median(seconds)

    def to_dict(self) -> dict[str, Any]:
        """All of it, with the ratios."""
        return dataclasses.asdict(self) | {
            "auto": self.speed_up(self.auto_seconds),
            "fixed": {gamma: self.speed_up(each) for gamma, each in self.fixed_seconds.items()},
        }


def run(
    options: PacingOptions,
    report: Callable[[int, int, str], None] | None = None,
    *,
    models: Any,
    decoding: GenerateOptions | None = None,
) -> Iterator[Row]:
    """Measures draft after draft.

    Args:
      options: what to decode.
      report: ``report(done, total, what)`` is told of each draft and batch size.
      models: the target and its draft (``cli.settings.Models``).
      decoding: temperature, lengths.

    Raises:
      InputError: nothing to decode, a beam search asked for, or random weights in the sizes
        of what is no T5.
    """
    decoding = decoding or GenerateOptions()
    if decoding.beams:
        raise InputError(f"beams is {decoding.beams}: a beam search has no pace, leave it 0")
    draft_options = models.draft_options()
    target = load(models.target, dtype=draft_options.dtype, vocabulary=models.vocabulary)
    generator = generator_of(target)
    texts = read_texts(options, generator, decoding, options.num_inputs)
    # As ``generate`` does.
    texts = sorted(texts, key=lambda text: len(generator.tokenize(text, decoding)))

    def draft_of(name: str) -> Draft:
        if name == RANDOM:
            return _random(draft_of(OWN), options.seed)
        name = models.draft_name() if name == OWN else name
        return make_draft(name, target, generator.target, draft_options)

    total = len(options.drafts) * len(options.batch_sizes)
    for number, name in enumerate(options.drafts):
        for place, size in enumerate(options.batch_sizes):
            if report:
                done = number * len(options.batch_sizes) + place
                report(done, total, f"draft {name}, batch {size}")
            sized = dataclasses.replace(decoding, batch_size=size)
            yield _measure(name, generator.with_draft(draft_of(name)), texts, sized, options)


def _random(own: Draft, seed: int) -> Draft:
    model = getattr(own, "model", None)
    if not isinstance(model, T5Model):
        raise InputError(
            f"draft is {RANDOM!r} and {type(own).__name__} the run's own: random weights need the "
            "sizes of a T5"
        )
    return TransformerDraft(random_model(model.config, model.config.dtype, seed))


def _measure(
    name: str,
    generator: Generator,
    texts: list[str],
    decoding: GenerateOptions,
    options: PacingOptions,
) -> Row:
    batches = generator.batches(texts, decoding)
    auto = dataclasses.replace(decoding, gamma=AUTO)
    ways = [(generator.plain(), decoding), (generator, auto)]
    ways += [(generator, dataclasses.replace(decoding, gamma=gamma)) for gamma in options.gammas]
    costs = generator.costs(batches[0], auto)
    seconds: list[list[float]] = [[] for _ in ways]
    for repeat in range(options.repeats + 1):
        runs = [which.run(of) for which, of in ways]
        sums = [0.0] * len(runs)
        for batch in batches:
            for index, each in enumerate(runs):
                sums[index] += _seconds(each, batch)
        # The first time was for compiling.
        for kept, taken in zip(seconds, sums, strict=True):
            kept += [taken] if repeat else []
    plain, paced, *fixed = seconds
    pace = jax.device_get(runs[1].pace)
    steps = pace and pace.plain_steps + pace.iterations
    return Row(
        draft=without_folder(name),
        batch_size=decoding.batch_size,
        temperature=decoding.temperature,
        costs=costs.iteration,
        prefill=costs.prefill,
        plain_share=float(pace.plain_steps / steps) if steps else 1.0,
        limit=float(pace.drafted / max(pace.iterations, 1)) if steps else 0.0,
        plain_seconds=plain,
        auto_seconds=paced,
        fixed_seconds=dict(zip(options.gammas, fixed, strict=True)),
    )


def _seconds(run: Run, batch: Batch) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run.decode(batch))
    return time.perf_counter() - start


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    gammas = list(rows[0].fixed_seconds)
    lines = [
        "| draft | batch | auto | "
        + " | ".join(f"gamma {gamma}" for gamma in gammas)
        + " | plain steps | drafts¹ | cost of 1, 4 drafts² | prefill² |",
        "|" + "---|" * (7 + len(gammas)),
    ]
    for row in rows:
        fixed = " | ".join(f"{row.speed_up(row.fixed_seconds[gamma]):.2f}" for gamma in gammas)
        costs = f"{row.costs[1]:.2f}, {row.costs[min(4, len(row.costs) - 1)]:.2f}"
        lines.append(
            f"| {row.draft} | {row.batch_size} | **{row.speed_up(row.auto_seconds):.2f}** "
            f"| {fixed} | {row.plain_share:.0%} | {row.limit:.1f} | {costs} | {row.prefill:.1f} |"
        )
    row = rows[0]
    lines += [
        "",
        f"Speed-up over plain decoding, medians of {len(row.plain_seconds)} runs; temperature "
        f"{row.temperature:g}. ¹ Of an iteration. ² In plain steps.",
    ]
    return "\n".join(lines)


def to_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """What JSON can hold."""
    return {"rows": [row.to_dict() for row in rows]}
