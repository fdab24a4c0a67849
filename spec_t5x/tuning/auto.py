"""``--gamma auto``: measured at the start on one's own inputs, remembered, never a loss.

    look up    what was found before for this machine, these models and settings
    measure    in a few seconds, and compile time (``measuring.py``)
    predict    the gamma whose speed-up is surely the largest (``prediction.py``)
    confirm    whole texts with it, against plain decoding, in turn
    remember   either way

Plain decoding is chosen unless the lower end of the predicted interval *and* what was
measured both say that speculation is faster. What was chosen decodes with a guard
(``guard.py``), since texts to come may be other than those of the sample.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

from spec_t5x.errors import InputError
from spec_t5x.generation import AUTO, GenerateOptions, Generator
from spec_t5x.guard import guard as make_guard
from spec_t5x.tuning.identity import identity
from spec_t5x.tuning.interleaving import Clock
from spec_t5x.tuning.measuring import Measurement, Place, confirm, measure
from spec_t5x.tuning.options import QUICK, TuningOptions
from spec_t5x.tuning.prediction import Prediction, choose_at, predict
from spec_t5x.tuning.store import Finding, Store

# Share of the budget that goes into confirming.
_CONFIRMING = 0.25
# A finding is good for as many inputs as this times those that it is based on: one that
# comes from a single text is not for ever.
_MANY_MORE = 4
# The name of the only draft.
_DRAFT = "draft"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """What to decode with, and why."""

    generator: Generator
    options: GenerateOptions
    # None where there was nothing to find: no draft, or no input.
    finding: Finding | None
    remembered: bool
    # Why it will not be remembered; None if it is.
    trouble: str | None = None

    @property
    def line(self) -> str:
        """What was chosen and why, for the user."""
        if self.finding is None:
            return "gamma 0: there is nothing to measure"
        found = self.finding
        interval = f"{found.speed_up:.2f} times plain decoding ({found.low:.2f}-{found.high:.2f})"
        measured = "" if found.measured is None else f", {found.measured:.2f} measured"
        texts = "input" if found.num_inputs == 1 else "inputs"
        based = f"on {found.num_inputs} {texts}"
        based += ", from an earlier run" if self.remembered else ""
        based += f"; {self.trouble}" if self.trouble else ""
        if self.options.gamma:
            return f"gamma {self.options.gamma}: {interval} expected{measured}, {based}"
        return (
            f"gamma 0, plain decoding: the best, gamma {found.best_gamma}, is not sure to be "
            f"faster, {interval} expected{measured}, {based}"
        )


def tuned(
    generator: Generator,
    texts: Sequence[str],
    options: GenerateOptions,
    *,
    tuning: TuningOptions = QUICK,
    store: Store | None = None,
    place: Place = lambda batch: batch,
    with_guard: bool = True,
    announce: Callable[[str], None] = lambda text: None,
    clock: Clock = time.perf_counter,
    measure: Callable[..., Measurement] = measure,
    confirm: Callable[..., float] = confirm,
) -> Tuned:
    """A generator and options in which ``gamma = "auto"`` has become a number.

    Args:
      generator: a target and its draft; without a draft there is nothing to choose.
      texts: inputs to measure on, of which the first few are taken.
      options: how to decode.
      tuning: how much to measure, and when to choose speculation.
      store: where findings are remembered; None neither looks there nor remembers.
      place: where batches go, if not to JAX's default device.
      with_guard: whether what is chosen gets a guard; ``options.guard`` asks for it, too.
      announce: told, before anything is measured, that it is going to be.
      clock, measure, confirm: for tests.

    Raises:
      InputError: an input that cannot be decoded.
    """
    if options.gamma != AUTO:
        raise InputError(f"gamma is {options.gamma}: only {AUTO} is tuned")
    if generator.draft is None or not texts:
        plain = dataclasses.replace(options, gamma=0, guard=False)
        return Tuned(generator=generator.plain(), options=plain, finding=None, remembered=False)
    sample = list(texts)[: tuning.num_inputs]
    guarded = with_guard or options.guard
    key = {"for": AUTO, "guard": guarded, **identity(generator, options)}
    found = store.load(key) if store else None
    if found and len(sample) < _MANY_MORE * found.num_inputs:
        return _tuned(generator, options, found, guarded, remembered=True)
    announce(f"measuring which gamma is best here, on {len(sample)} of the inputs")
    common = {"place": place, "clock": clock}
    measurement = measure(
        generator,
        {_DRAFT: generator.draft},
        sample,
        options,
        batch_sizes=(options.batch_size,),
        tuning=dataclasses.replace(tuning, budget=(1 - _CONFIRMING) * tuning.budget),
        **common,
    )
    predictions = predict(measurement, tuning)
    chosen = choose_at(predictions, options.batch_size, tuning.margin)
    best = chosen if chosen.gamma else _likeliest(predictions)
    found = _finding(best, chosen.gamma, measurement)
    if chosen.gamma:
        trial = _tuned(generator, options, found, guarded, remembered=False)
        factor = confirm(
            trial.generator,
            sample,
            trial.options,
            budget=_CONFIRMING * tuning.budget,
            **common,
        )
        found = dataclasses.replace(
            found, measured=factor, gamma=chosen.gamma if factor >= 1 else 0
        )
    trouble = store.save(key, found) if store else None
    result = _tuned(generator, options, found, guarded, remembered=False)
    return dataclasses.replace(result, trouble=trouble)


def guarded(
    generator: Generator,
    texts: Sequence[str],
    options: GenerateOptions,
    *,
    tuning: TuningOptions = QUICK,
    store: Store | None = None,
    place: Place = lambda batch: batch,
    announce: Callable[[str], None] = lambda text: None,
    clock: Clock = time.perf_counter,
    measure: Callable[..., Measurement] = measure,
) -> Generator:
    """The generator with the costs that ``options.guard`` needs, for a given gamma.

    Args:
      options: how to decode, gamma included.
      generator, texts, tuning, store, place, announce, clock, measure: as of ``tuned``.

    Raises:
      InputError: gamma is to be tuned, there is no input, or one cannot be decoded.
    """
    if options.gamma == AUTO:
        raise InputError(f"gamma is {AUTO}: use tuned, which guards what it chooses")
    if generator.draft is None or options.gamma == 0:
        return generator
    if not texts:
        raise InputError("there is no input to measure the guard's costs on: give at least one")
    key = {"for": "guard", "gamma": options.gamma, **identity(generator, options)}
    found = store.load(key) if store else None
    if found is None:
        announce(f"measuring what gamma {options.gamma} costs here")
        measurement = measure(
            generator,
            {_DRAFT: generator.draft},
            list(texts)[: tuning.num_inputs],
            options,
            batch_sizes=(options.batch_size,),
            tuning=dataclasses.replace(
                tuning,
                max_gamma=options.gamma,
                probes=(options.gamma,),
                timed_gammas=(),
                budget=tuning.budget / 2,
            ),
            place=place,
            clock=clock,
        )
        (prediction,) = (p for p in predict(measurement, tuning) if p.gamma == options.gamma)
        found = _finding(prediction, options.gamma, measurement)
        if store and (trouble := store.save(key, found)):
            announce(trouble)
    return _with_guard(generator, found)


def _likeliest(predictions: Sequence[Prediction]) -> Prediction:
    """The best that speculation can hope for."""
    return max((p for p in predictions if p.gamma), key=lambda p: p.speed_up)


def _finding(prediction: Prediction, gamma: int, measurement: Measurement) -> Finding:
    return Finding(
        gamma=gamma,
        best_gamma=prediction.gamma,
        speed_up=prediction.speed_up,
        low=prediction.low,
        high=prediction.high,
        measured=None,
        c=prediction.costs.c,
        verification=prediction.costs.verification,
        prefill=prediction.costs.prefill,
        num_inputs=measurement.num_inputs,
        num_tokens=measurement.traces[_DRAFT].num_tokens,
    )


def _tuned(
    generator: Generator,
    options: GenerateOptions,
    found: Finding,
    guarded: bool,
    *,
    remembered: bool,
) -> Tuned:
    options = dataclasses.replace(options, gamma=found.gamma, guard=guarded and found.gamma > 0)
    if found.gamma == 0:
        generator = generator.plain()
    elif guarded:
        generator = _with_guard(generator, found)
    return Tuned(generator=generator, options=options, finding=found, remembered=remembered)


def _with_guard(generator: Generator, found: Finding) -> Generator:
    costs = make_guard(c=found.c, verification=found.verification, prefill=found.prefill)
    return dataclasses.replace(generator, guard=costs)
