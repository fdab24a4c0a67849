"""From what was measured to a predicted speed-up, for each draft, gamma and batch size.

    time of plain decoding  =  batches · S_plain + steps · P
    time of speculation     =  batches · S_draft + sum over iterations of I(gamma, proposed)
    I(gamma, proposed)      =  D(gamma) + T(width) + overhead(gamma)

S is what a batch costs before its first token, P a plain step in its loop, D the drafts of
an iteration, T the target's call over all that is verified: gamma + 1 tokens, a tree's
nodes, or as many as the longest proposal of the batch needs. The overhead is what the loops
take beyond these calls: known plainly, where gamma is 0, and at the gammas that were run;
between them it grows in a straight line, since most of it is work on gamma + 1
distributions. With one row, no set-up and no overhead this is the improvement of Theorem
3.8 in its form by position (``theory.wall_time_improvement_by_position``), whose betas are
``Trace.by_position``. The iterations are simulated from the traces, so that a batch lasts as
long as its last row.

Intervals are bootstrapped: each resample draws inputs with replacement and puts them
together to batches, and draws rounds of the timings, all programs of a round together, whose
medians it takes. Few inputs say little of the inputs to come, however long they are: with
fewer than eight, the iterations are resampled on top.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from spec_t5x.decoding import call_widths
from spec_t5x.errors import InputError
from spec_t5x.tuning.measuring import BatchTimes, DraftTimes, Measurement
from spec_t5x.tuning.options import TuningOptions
from spec_t5x.tuning.traces import ENDED, Counts, groups_of
from spec_t5x.types import Array, Float, Int
from spec_t5x.verifiers import TreeVerifier

# Fewer inputs than this are not many.
_FEW = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What a guard wants to know, in steps of plain decoding as they are in the loop."""

    # Of one draft step.
    c: float
    # Of the target's call over gamma + 1 tokens, with all that an iteration has besides.
    verification: float
    # What a batch costs more before its first token.
    prefill: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one setting is expected to do."""

    # None with gamma 0: plain decoding.
    draft: str | None
    gamma: int
    batch_size: int
    # Factor over plain decoding at the same batch size, set-up included, and its interval.
    speed_up: float
    low: float
    high: float
    # Generated tokens for each target call, by the simulated iterations: 1 plainly.
    block_efficiency: float
    # Generated in a second, in all rows.
    tokens_per_second: float
    # Of the paper, in calls of the target over one token: c = D(gamma) / gamma, T(gamma + 1).
    c: float
    verification_cost: float
    # Milliseconds: a plain step, an iteration, and what of it is neither draft nor target.
    plain_step: float
    iteration: float
    overhead: float
    # Of a batch before its first token, plainly and with the draft.
    plain_setup: float
    setup: float
    costs: Costs


def predict(measurement: Measurement, tuning: TuningOptions) -> list[Prediction]:
    """Predictions for every batch size, and there for gamma 0 and every draft and gamma.

    Args:
      measurement: the figures.
      tuning: how intervals are made.
    """
    counts = {name: trace.counts(tuning.seed) for name, trace in measurement.traces.items()}
    return [
        prediction
        for size in measurement.times
        for prediction in _Predictor.create(measurement, size, tuning).all(counts)
    ]


def best_of(predictions: list[Prediction]) -> list[Prediction]:
    """The best gamma of each draft at each batch size, by its lower end."""
    best: dict[tuple, Prediction] = {}
    for prediction in predictions:
        key = (prediction.batch_size, prediction.draft)
        if prediction.gamma and (key not in best or prediction.low > best[key].low):
            best[key] = prediction
    return list(best.values())


def choose(predictions: list[Prediction], margin: float) -> Prediction:
    """The setting that surely gives the most tokens in a second.

    Of each batch size the draft and gamma whose lower end is the highest, if that is above 1
    by the margin, else plain decoding; of these the fastest.

    Raises:
      InputError: no prediction.
    """
    if not predictions:
        raise InputError("nothing was predicted: measure at least one draft")
    return max(
        (choose_at(predictions, size, margin) for size in {p.batch_size for p in predictions}),
        key=lambda prediction: prediction.tokens_per_second,
    )


def choose_at(predictions: list[Prediction], batch_size: int, margin: float) -> Prediction:
    """The same at one batch size."""
    here = [prediction for prediction in predictions if prediction.batch_size == batch_size]
    (plain,) = (prediction for prediction in here if prediction.gamma == 0)
    best = max(here, key=lambda prediction: prediction.low)
    return best if best.low >= 1 + margin else plain


@dataclasses.dataclass(frozen=True)
class _Resamples:
    """Inputs in batches, and rounds: of each resample, and before them as they were."""

    groups: Int[np.ndarray, "samples batches batch"]
    rounds: Int[np.ndarray, "samples rounds"]

    @classmethod
    def create(cls, num_inputs: int, batch_size: int, num_rounds: int, tuning: TuningOptions):
        rng = np.random.default_rng(tuning.seed)
        inputs = rng.integers(num_inputs, size=(tuning.resamples, num_inputs))
        groups = groups_of(num_inputs, batch_size)
        drawn = np.where(groups < 0, -1, inputs[:, np.maximum(groups, 0)])
        rounds = rng.integers(num_rounds, size=(tuning.resamples, num_rounds))
        return cls(
            np.concatenate([groups[None], drawn]),
            np.concatenate([np.arange(num_rounds)[None], rounds]),
        )

    def medians(self, values: Float[Array, "rounds *columns"]) -> Float[Array, "samples *columns"]:
        """Of each resample's rounds."""
        return np.median(values[self.rounds], axis=1)


@dataclasses.dataclass(frozen=True)
class _Predictor:
    """Predictions at one batch size. Arrays lead with the resamples."""

    measurement: Measurement
    times: BatchTimes
    resamples: _Resamples
    tuning: TuningOptions
    # Seconds: T by width, a plain step, the set-up of a batch.
    target: Float[np.ndarray, "samples widths"]
    plain_step: Float[np.ndarray, "samples"]
    plain_setup: Float[np.ndarray, "samples"]

    @classmethod
    def create(cls, measurement: Measurement, size: int, tuning: TuningOptions) -> "_Predictor":
        times = measurement.times[size]
        resamples = _Resamples.create(
            measurement.num_inputs, times.batch_size, len(times.plain), tuning
        )
        loop = resamples.medians(times.plain - times.plain_setup)
        return cls(
            measurement,
            times,
            resamples,
            tuning,
            target=resamples.medians(times.target),
            plain_step=loop / times.steps,
            plain_setup=resamples.medians(times.plain_setup) / len(times.inputs),
        )

    def all(self, counts: Mapping[str, Counts]) -> list[Prediction]:
        plain = self._plain_seconds(next(iter(counts.values())))
        predictions = [self._plain(next(iter(counts.values())), plain)]
        for name, times in self.times.drafts.items():
            known = counts[name]
            draft = _DraftCosts.create(self, name, times, known)
            # Sampled texts differ from draft to draft: each is compared with its own.
            seconds = self._plain_seconds(known)
            for gamma in range(1, known.max_gamma + 1):
                predictions.append(self._prediction(draft, known, gamma, seconds))
        return predictions

    def _plain_seconds(self, counts: Counts) -> Float[np.ndarray, "samples"]:
        """Of the whole sample, plainly decoded."""
        groups = self.resamples.groups
        steps = counts.steps(groups).sum(axis=-1)
        return groups.shape[1] * self.plain_setup + steps * self.plain_step

    def _plain(self, counts: Counts, seconds: Float[Array, "samples"]) -> Prediction:
        return Prediction(
            draft=None,
            gamma=0,
            batch_size=self.times.batch_size,
            speed_up=1.0,
            low=1.0,
            high=1.0,
            block_efficiency=1.0,
            tokens_per_second=float(counts.lengths.sum() / seconds[0]),
            c=0.0,
            verification_cost=1.0,
            plain_step=1e3 * float(self.plain_step[0]),
            iteration=1e3 * float(self.plain_step[0]),
            overhead=1e3 * float(self.plain_step[0] - self.target[0, 0]),
            plain_setup=1e3 * float(self.plain_setup[0]),
            setup=1e3 * float(self.plain_setup[0]),
            costs=Costs(c=0.0, verification=1.0, prefill=0.0),
        )

    def _prediction(
        self, draft: "_DraftCosts", counts: Counts, gamma: int, plain: Float[Array, "samples"]
    ) -> Prediction:
        groups = self.resamples.groups
        proposed = counts.of_batches(gamma, groups)
        loop = draft.loop_seconds(gamma, proposed) * self._doubt(counts, gamma)
        seconds = groups.shape[1] * draft.setup + loop
        factors = plain / seconds
        outside = (1 - self.tuning.confidence) / 2
        low, high = np.quantile(factors[1:], [outside, 1 - outside])
        point, iterations = float(factors[0]), int(np.sum(proposed[0] != ENDED))
        return Prediction(
            draft=draft.name,
            gamma=gamma,
            batch_size=self.times.batch_size,
            speed_up=point,
            low=min(float(low), point),
            high=max(float(high), point),
            block_efficiency=float(counts.lengths.sum() / counts.iterations(gamma).sum()),
            tokens_per_second=float(counts.lengths.sum() / seconds[0]),
            c=float(draft.propose(gamma)[0] / gamma / self.target[0, 0]),
            verification_cost=float(self.verification(gamma, gamma)[0] / self.target[0, 0]),
            plain_step=1e3 * float(self.plain_step[0]),
            iteration=1e3 * float(loop[0] / iterations),
            overhead=1e3 * float(draft.overhead(gamma)[0]),
            plain_setup=1e3 * float(self.plain_setup[0]),
            setup=1e3 * float(draft.setup[0]),
            costs=self._costs(draft, gamma),
        )

    def _costs(self, draft: "_DraftCosts", gamma: int) -> Costs:
        step = self.plain_step[0]
        verification = self.verification(gamma, gamma)[0] + draft.overhead(gamma)[0]
        return Costs(
            c=float(draft.propose(gamma)[0] / gamma / step),
            # Timings scatter; nothing costs less than nothing.
            verification=float(max(verification / step, 0.0)),
            prefill=float(max((draft.setup[0] - self.plain_setup[0]) / step, 0.0)),
        )

    def _doubt(self, counts: Counts, gamma: int) -> Float[np.ndarray, "samples"]:
        """What few inputs leave open: iterations for the same text, by resampled advances."""
        factors = np.ones(len(self.resamples.groups))
        if self.measurement.num_inputs >= _FEW:
            return factors
        rng = np.random.default_rng(self.tuning.seed)
        advances = counts.advances(gamma)
        drawn = rng.choice(advances, size=(self.tuning.resamples, len(advances)))
        factors[1:] = advances.mean() / drawn.mean(axis=1)
        return factors

    def verification(self, gamma: int, proposed: int) -> Float[np.ndarray, "samples"]:
        """Seconds of the target's call that verifies ``proposed`` drafts of at most ``gamma``."""
        verifier = self.measurement.verifier
        width = verifier.num_nodes(gamma)
        if proposed < gamma and not isinstance(verifier, TreeVerifier):
            width = min(width for width in call_widths(gamma + 1) if width > proposed)
        return _line(width, self.times.widths, self.target)


@dataclasses.dataclass(frozen=True)
class _DraftCosts:
    """Seconds of a draft's iterations. Arrays lead with the resamples."""

    name: str
    predictor: _Predictor
    gammas: tuple[int, ...]
    proposals: Float[np.ndarray, "samples gammas"]
    # Of an iteration beyond its calls, plainly and with as many drafts as were run.
    probes: tuple[int, ...]
    overheads: Float[np.ndarray, "samples probes"]
    setup: Float[np.ndarray, "samples"]

    @classmethod
    def create(
        cls, predictor: _Predictor, name: str, times: DraftTimes, counts: Counts
    ) -> "_DraftCosts":
        medians = predictor.resamples.medians
        plain = predictor.plain_step - predictor.target[:, 0]
        costs = cls(
            name,
            predictor,
            times.gammas,
            proposals=medians(times.propose),
            # None yet: of the calls alone.
            probes=(0, *times.probes),
            overheads=np.zeros((len(plain), 1 + len(times.probes))),
            setup=medians(times.setup).mean(axis=1) / len(predictor.times.inputs),
        )
        # What the timed batches took beyond the calls that they made.
        loops = medians(times.decode - times.setup) / times.iterations
        timed = groups_of_places(predictor.times.inputs, predictor.times.batch_size)
        calls = [
            costs.seconds_each(gamma, counts.of_batches(gamma, timed)) for gamma in times.probes
        ]
        return dataclasses.replace(
            costs,
            probes=(0, *times.probes),
            overheads=np.concatenate([plain[:, None], loops - np.stack(calls, axis=1)], axis=1),
        )

    def propose(self, gamma: int) -> Float[np.ndarray, "samples"]:
        """D(gamma)."""
        return _line(gamma, self.gammas, self.proposals)

    def overhead(self, gamma: int) -> Float[np.ndarray, "samples"]:
        """Seconds of an iteration beyond its calls."""
        there = _line(gamma, self.probes, self.overheads)
        if gamma <= self.probes[-1]:
            return there
        # Beyond what was run it may grow on; that it shrinks would be chance.
        slope = (self.overheads[:, -1] - self.overheads[:, -2]) / (
            self.probes[-1] - self.probes[-2]
        )
        return there + (gamma - self.probes[-1]) * np.maximum(slope, 0.0)

    def seconds_each(
        self, gamma: int, proposed: Int[Array, "batches iterations"]
    ) -> Float[np.ndarray, "samples"]:
        """Of one iteration, on average."""
        return self.loop_seconds(gamma, proposed) / np.sum(proposed != ENDED)

    def loop_seconds(
        self, gamma: int, proposed: Int[Array, "*samples batches iterations"]
    ) -> Float[np.ndarray, "samples"]:
        """Of all iterations of all batches.

        Args:
          gamma: drafts at most.
          proposed: the longest proposal of each iteration, ``ENDED`` for none.
        """
        here = proposed.reshape(-1 if proposed.ndim > 2 else 1, *proposed.shape[-2:])
        seconds, overhead = np.zeros(len(self.setup)), self.overhead(gamma)
        for count in np.unique(here[here != ENDED]).tolist():
            num = np.sum(here == count, axis=(1, 2))
            each = self.propose(gamma) + self.predictor.verification(gamma, count) + overhead
            seconds = seconds + num * each
        return seconds


def groups_of_places(
    places: tuple[tuple[int, ...], ...], batch_size: int
) -> Int[np.ndarray, "batches batch"]:
    """Places of inputs in batches, as ``traces.groups_of`` has them."""
    groups = np.full((len(places), batch_size), -1, np.int64)
    for number, row in enumerate(places):
        groups[number, : len(row)] = row
    return groups


def _line(
    at: int, points: tuple[int, ...], values: Float[Array, "samples points"]
) -> Float[np.ndarray, "samples"]:
    """Between two points a straight line; at the ends, as far as there are points."""
    above = int(np.searchsorted(points, at))
    if above == 0:
        return values[:, 0]
    if above == len(points):
        return values[:, -1]
    share = (at - points[above - 1]) / (points[above] - points[above - 1])
    return (1 - share) * values[:, above - 1] + share * values[:, above]
