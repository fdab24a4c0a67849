"""How cost grows: with the batch, the length of the text, gamma, and the size of the model.

From a middle point one axis at a time is walked along, for the run's own pair and for T5s
of published sizes with random weights. At each point the same number of tokens is decoded
plainly and speculatively, in turn, compilation apart. Acceptance is synthetic
(``experiments.synthetic_acceptance``): each draft is accepted with probability alpha, so
that texts have the lengths that are asked for, and curves differ by cost alone.

Beside what was measured stands what the cost model says from three calls timed at the same
point, c = D / T(1) and T(gamma + 1): an iteration lasts gamma c + T(gamma + 1) target steps
(Theorem 3.8), and a batch as long as its last row (``expected_iterations``). Set-up (the
encoders, the keys and values of the source) is left out of both.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import make_draft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.experiments.inputs import generator_of
from spec_t5x.experiments.synthetic_acceptance import SyntheticVerifier, random_model
from spec_t5x.generation import GenerateOptions
from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import T5Config
from spec_t5x.sampling.distributions import sampling
from spec_t5x.theory import formulas
from spec_t5x.tuning.interleaving import Program, interleaved
from spec_t5x.tuning.step_times import measure_step_times

HELP = "cost by batch, output length, gamma and size"

# The run's own pair, among names of sizes.
OWN = "own"
AXES = ("batch", "length", "gamma")
# No token ends a row: the lengths are given.
_NO_EOS = -1
# A draft beside a target of random weights has so much of each of its widths.
_DRAFT_SHARE = 4
_DRAFT_LAYERS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthOptions:
    """Where to measure."""

    # ``own`` is the run's pair; others are names of ``models.sizes``.
    pairs: tuple = (OWN, "t5_1_1_small")
    # Chance that a draft is accepted.
    alpha: float = 0.7
    # The middle point, and what is walked through from there.
    batch: int = 1
    length: int = 128
    gamma: int = 4
    batches: tuple = (1, 2, 4, 8, 16, 32)
    lengths: tuple = (32, 64, 128, 256, 512, 1024)
    gammas: tuple = (1, 2, 3, 4, 6, 8, 11, 15)
    # Encoder length, without padding.
    source_len: int = 64
    # Decodes of each point, and timings of a step.
    repeats: int = 3
    step_repeats: int = 5
    # Where to draw the curves, as SVG; None draws none.
    figure: str | None = None
    seed: int = 0

    def __post_init__(self):
        numbers = ("batch", "length", "gamma", "source_len", "repeats", "step_repeats")
        values = {name: (getattr(self, name),) for name in numbers}
        for name in ("batches", "lengths", "gammas"):
            values[name] = getattr(self, name)
        for name, all_of in values.items():
            for value in all_of:
                if not isinstance(value, int) or value < 1:
                    raise InputError(f"{name} is {value!r}: give whole numbers from 1")
        SyntheticVerifier(alpha=self.alpha)
        for pair in self.pairs:
            if pair != OWN:
                size(pair)

    def points(self) -> list["Point"]:
        """All points of the three walks, each once."""
        middle = Point(batch=self.batch, length=self.length, gamma=self.gamma)
        walks = {"batch": self.batches, "length": self.lengths, "gamma": self.gammas}
        walked = [
            dataclasses.replace(middle, **{axis: value}) for axis in AXES for value in walks[axis]
        ]
        return list(dict.fromkeys([middle, *walked]))


# As the command knows it (``cli.benchmark``).
Options = GrowthOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Where something is measured."""

    # Rows, tokens of each, drafts of an iteration.
    batch: int
    length: int
    gamma: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured at a point. Seconds are of every repeat, without set-up."""

    pair: str
    point: Point
    # The middle point, from which it is one step along one axis.
    middle: Point
    alpha: float
    plain_seconds: list[float]
    speculative_seconds: list[float]
    # Of the set-up: medians.
    plain_setup: float
    speculative_setup: float
    # Iterations until the last row had ended.
    iterations: int
    # Milliseconds of the target's call over one token.
    target_step: float
    # In target steps.
    c: float
    verification: float

    @property
    def speed_up(self) -> float:
        """Measured: ratio of the medians."""
        return statistics.median(self.plain_seconds) / statistics.median(self.speculative_seconds)

    @property
    def predicted(self) -> float:
        """By the cost model."""
        return self.predicted_at(self.point.gamma)

    @property
    def best_gamma(self) -> int:
        """The gamma that the cost model prefers here; 0 is plain decoding.

        T(m) is taken to grow in a straight line from T(1) to the one that was measured.
        """
        gammas = range(1, 16)
        factors = [1.0, *(self.predicted_at(gamma) for gamma in gammas)]
        return int(np.argmax(factors))

    def predicted_at(self, gamma: int) -> float:
        """By the cost model, with another gamma at the same place."""
        verification = 1 + (self.verification - 1) * gamma / self.point.gamma
        iterations = expected_iterations(self.alpha, gamma, self.point.length, self.point.batch)
        return self.point.length / (
            iterations * formulas.iteration_time(gamma, self.c, verification)
        )

    def milliseconds(self, seconds: Sequence[float]) -> float:
        """Of a token of a row."""
        return 1e3 * statistics.median(seconds) / self.point.length

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return dataclasses.asdict(self) | {
            "speed_up": self.speed_up,
            "predicted": self.predicted,
            "best_gamma": self.best_gamma,
        }


@functools.lru_cache
def expected_iterations(alpha: float, gamma: int, length: int, batch: int) -> float:
    """Iterations until the last of ``batch`` rows has ``length`` tokens.

    Each iteration of a row brings 1 to gamma + 1 tokens, as many as Section 3.1 says; rows
    advance independently. Exact: by the distribution of what a row has after each.

    Args:
      alpha: chance that a draft is accepted, i.i.d.
      gamma: drafts of an iteration, at least 1.
      length: tokens of each row.
      batch: rows.
    """
    advance = np.concatenate([[0.0], formulas.length_pmf(np.float64(alpha), gamma)])
    # How likely a row is to have 0, 1, … tokens and not to be done.
    unfinished, expected = np.ones(1), 0.0
    while unfinished.sum() > 1e-12:
        expected += 1 - (1 - min(unfinished.sum(), 1.0)) ** batch
        unfinished = np.convolve(unfinished, advance)[:length]
    return expected


def run(
    options: GrowthOptions,
    report: Callable[[int, int, str], None] | None = None,
    *,
    models: Any,
    decoding: GenerateOptions | None = None,
) -> Iterator[Row]:
    """Measures point after point; draws the curves at the end.

    Args:
      options: where to measure.
      report: ``report(done, total, what)`` is told of each point.
      models: the run's own pair (``cli.settings.Models``).
      decoding: the temperature.

    Raises:
      InputError: a pair that cannot be loaded.
    """
    decoding = decoding or GenerateOptions()
    points, rows = options.points(), []
    total = len(points) * len(options.pairs)
    for name in options.pairs:
        target, draft = _pair(name, models, options.seed)
        for point in points:
            if report:
                what = f"{name}, batch {point.batch}, {point.length} tokens, gamma {point.gamma}"
                report(len(rows), total, what)
            rows.append(_measure(name, target, draft, point, options, decoding))
            yield rows[-1]
            # Of no more use, and they fill the memory.
            jax.clear_caches()
    if options.figure:
        draw(rows).savefig(options.figure, format="svg")


def _pair(name: str, models: Any, seed: int) -> tuple[Target, Draft]:
    if name == OWN:
        draft_options = models.draft_options()
        loaded = load(models.target, dtype=draft_options.dtype, vocabulary=models.vocabulary)
        target = generator_of(loaded).target
        return target, make_draft(models.draft_name(), loaded, target, draft_options)
    config, dtype = size(name), resolve_dtype(models.dtype)
    draft = random_model(small_draft(config), dtype, seed + 1)
    return random_model(config, dtype, seed), TransformerDraft(draft)


def small_draft(config: T5Config) -> T5Config:
    """Sizes of a draft for random weights: two layers, a quarter as wide."""
    return dataclasses.replace(
        config,
        emb_dim=config.emb_dim // _DRAFT_SHARE,
        mlp_dim=config.mlp_dim // _DRAFT_SHARE,
        num_heads=max(config.num_heads // _DRAFT_SHARE, 1),
        num_encoder_layers=_DRAFT_LAYERS,
        num_decoder_layers=_DRAFT_LAYERS,
    )


def _measure(
    name: str,
    target: Target,
    draft: Draft,
    point: Point,
    options: GrowthOptions,
    decoding: GenerateOptions,
) -> Row:
    rng = np.random.default_rng(options.seed)
    shape = (point.batch, options.source_len)
    sources = jnp.asarray(rng.integers(3, min(target.vocab_size, 1000), shape), jnp.int32)
    settings = sampling(decoding.temperature, decoding.top_k, decoding.top_p)
    plain, speculative = _programs(target, draft, sources, point, settings, options)
    everything, nothing = (jnp.full(point.batch, n, jnp.int32) for n in (point.length, 0))
    ways = [
        Program.once(functools.partial(program, steps))
        for steps in (everything, nothing)
        for program in (plain, speculative)
    ]
    rounds = interleaved(ways, least=options.repeats, most=options.repeats)
    setups = np.median(rounds[:, 2:], axis=0)
    loops = np.maximum(rounds[:, :2] - setups, 1e-9)
    times = measure_step_times(
        target,
        draft,
        sources,
        gamma=point.gamma,
        max_decode_len=point.length,
        settings=settings,
        verifier=SyntheticVerifier(alpha=options.alpha),
        repeats=options.step_repeats,
    )
    return Row(
        pair=name,
        point=point,
        middle=options.points()[0],
        alpha=options.alpha,
        plain_seconds=loops[:, 0].tolist(),
        speculative_seconds=loops[:, 1].tolist(),
        plain_setup=float(setups[0]),
        speculative_setup=float(setups[1]),
        iterations=int(np.max(speculative(everything).stats.target_calls)),
        target_step=times.target,
        c=times.c,
        verification=times.verification_cost,
    )


def _programs(target, draft, sources, point: Point, settings, options: GrowthOptions):
    """Plain and speculative decoding: ``steps -> Decoded``."""
    prompts = jnp.zeros((point.batch, 1), jnp.int32)
    key = jax.random.key(options.seed)
    common = {"max_decode_len": point.length, "eos_id": _NO_EOS}

    def plain(steps):
        return autoregressive_decode(
            target, sources, prompts, key, settings, max_decode_steps=steps, **common
        )

    def speculative(steps):
        return speculative_decode(
            target,
            draft,
            sources,
            prompts,
            key,
            settings,
            gamma=point.gamma,
            max_decode_steps=steps,
            verifier=SyntheticVerifier(alpha=options.alpha),
            **common,
        )

    return plain, speculative


# --- what is told of it ------------------------------------------------------------


def walk(rows: Sequence[Row], pair: str, axis: str) -> list[Row]:
    """The rows of a pair along an axis, in order."""
    along = [
        row
        for row in rows
        if row.pair == pair
        and all(
            getattr(row.point, other) == getattr(row.middle, other)
            for other in AXES
            if other != axis
        )
    ]
    return sorted(along, key=lambda row: getattr(row.point, axis))


def crossing(places: Sequence[int], factors: Sequence[float]) -> float | None:
    """Where speculation stops paying: the last place at which the curve falls through 1.

    Between two points as on a logarithmic axis, on which batches and lengths lie; None if
    it does not fall through 1.

    >>> crossing([1, 2, 4], [1.5, 1.25, 0.75])
    2.8284271247461903
    """
    found = None
    for i in range(1, len(places)):
        before, after = factors[i - 1], factors[i]
        if before >= 1 > after:
            share = (before - 1) / (before - after)
            found = places[i - 1] * (places[i] / places[i - 1]) ** share
    return found


def crossings(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float | None]]]:
    """By pair and axis, measured and predicted."""
    return {
        pair: {axis: _crossing_along(walk(rows, pair, axis), axis) for axis in AXES}
        for pair in dict.fromkeys(row.pair for row in rows)
    }


def _crossing_along(along: Sequence[Row], axis: str) -> dict[str, float | None]:
    places = [getattr(row.point, axis) for row in along]
    return {
        "measured": crossing(places, [row.speed_up for row in along]),
        "predicted": crossing(places, [row.predicted for row in along]),
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, and where the curves fall through 1."""
    lines = [
        "| pair | batch | tokens | gamma | c | T(verify) | plain ms/token | speculative ms/token "
        "| speed-up | predicted | best gamma¹ |",
        "|" + "---|" * 11,
    ]
    for pair in dict.fromkeys(row.pair for row in rows):
        for axis in AXES:
            for row in walk(rows, pair, axis):
                point = row.point
                lines.append(
                    f"| {pair} | {point.batch} | {point.length} | {point.gamma} | {row.c:.3f} "
                    f"| {row.verification:.2f} | {row.milliseconds(row.plain_seconds):.3f} "
                    f"| {row.milliseconds(row.speculative_seconds):.3f} | {row.speed_up:.2f} "
                    f"| {row.predicted:.2f} | {row.best_gamma} |"
                )
    lines += [
        "",
        f"Each draft accepted with probability {rows[0].alpha:g}; times of a token of a row, "
        "set-up left out. ¹ Of the cost model, 0 is plain decoding.",
        "",
    ]
    for pair, by_axis in crossings(rows).items():
        for axis, found in by_axis.items():
            measured, predicted = map(_place, found.values())
            lines.append(
                f"- {pair}, {axis}: stops paying at {measured} measured, {predicted} predicted."
            )
    return "\n".join(lines)


def _place(value: float | None) -> str:
    return "no point" if value is None else f"{value:.1f}"


def to_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """What JSON can hold."""
    return {"rows": [row.to_dict() for row in rows], "crossings": crossings(rows)}


def draw(rows: Sequence[Row]) -> Figure:
    """The speed-up along each axis, a row of panels for each pair."""
    pairs = list(dict.fromkeys(row.pair for row in rows))
    figure = Figure(figsize=(11, 0.6 + 2.8 * len(pairs)), layout="constrained")
    panels = figure.subplots(len(pairs), len(AXES), squeeze=False)
    titles = {"batch": "batch", "length": "tokens of a row", "gamma": "gamma"}
    for pair, row_of_panels in zip(pairs, panels, strict=True):
        for axis, axes in zip(AXES, row_of_panels, strict=True):
            along = walk(rows, pair, axis)
            places = [getattr(row.point, axis) for row in along]
            axes.plot(places, [row.speed_up for row in along], "o-", label="measured")
            axes.plot(places, [row.predicted for row in along], "s--", label="predicted")
            axes.axhline(1, color="grey", linewidth=0.8)
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, map(str, places))
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.set_xlabel(titles[axis])
            axes.set_title(pair if axis == AXES[0] else "")
        row_of_panels[0].set_ylabel("speed-up")
        row_of_panels[0].legend()
    return figure
