"""A run of ``spec-t5x tune``: drafts by name, texts from a file, and what came of it.

The figures are those of ``tuning``; here they are put beside measured ones, into tables and
into a gin file that the other commands take.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from spec_t5x.checkpoints.drafts import DraftOptions, make_draft
from spec_t5x.checkpoints.loaded_model import LoadedModel
from spec_t5x.errors import InputError
from spec_t5x.experiments.comparison import compare
from spec_t5x.experiments.inputs import (
    InputOptions,
    generator_of,
    read_texts,
    without_folder,
)
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.interfaces import Draft
from spec_t5x.tuning.identity import machine
from spec_t5x.tuning.measuring import Report, measure
from spec_t5x.tuning.options import MAX_GAMMA, TuningOptions
from spec_t5x.tuning.prediction import Prediction, best_of, choose, predict

# A setting: draft, gamma, batch size.
Setting = tuple[str | None, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneRun(InputOptions):
    """What to tune, and on what."""

    # As on the command line; () takes the draft of ``Models``.
    drafts: tuple = ()
    batch_sizes: tuple = (1,)
    # Whether to decode with the best gamma of each draft at each batch size, too, and how
    # often.
    measure: bool = False
    repeats: int = 5
    # The rest as of ``tuning.options.TuningOptions``.
    num_inputs: int = 32
    budget: float = 20.0
    max_gamma: int = MAX_GAMMA
    confidence: float = 0.95
    margin: float = 0.05

    def __post_init__(self):
        for name in ("drafts", "batch_sizes"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                raise InputError(f"{name} is {value!r}: give a list, as in ({value!r},)")
            # gin's sequences.
            object.__setattr__(self, name, tuple(value))
            if len(set(value)) < len(value):
                shown = ", ".join(map(str, value))
                raise InputError(f"{name} are {shown}: give each of them once")
        for size in self.batch_sizes:
            if not isinstance(size, int) or size < 1:
                raise InputError(f"batch_size is {size!r}: give a whole number from 1")
        if not self.batch_sizes:
            raise InputError("batch_sizes are empty: give at least one")
        if not isinstance(self.repeats, int) or self.repeats < 1:
            raise InputError(f"repeats is {self.repeats!r}: give a whole number from 1")
        if self.data and self.mixture_or_task:
            raise InputError(
                f"data is {self.data!r} and mixture_or_task {self.mixture_or_task!r}: give one"
            )
        self.tuning()

    def tuning(self) -> TuningOptions:
        """How much to measure."""
        names = [field.name for field in dataclasses.fields(TuningOptions)]
        ours = {field.name for field in dataclasses.fields(self)}
        return TuningOptions(**{name: getattr(self, name) for name in names if name in ours})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What was predicted, chosen and measured."""

    predictions: list[Prediction]
    chosen: Prediction
    # Speed-ups of whole texts, of the settings that were tried.
    measured: Mapping[Setting, float]
    # By draft: how often the i-th draft is accepted where those before it were.
    by_position: Mapping[str, list[float]]
    num_inputs: int
    num_tokens: int
    confidence: float
    # Of all programs, not counted anywhere.
    compile_seconds: float

    @property
    def best(self) -> list[Prediction]:
        """The best gamma of each draft at each batch size."""
        return best_of(self.predictions)


def run(
    chosen: TuneRun,
    options: GenerateOptions,
    target: LoadedModel,
    texts: Sequence[str] = (),
    draft_options: DraftOptions | None = None,
    report: Report | None = None,
) -> TuneResult:
    """Measures and predicts; decodes with the best settings if asked to.

    Args:
      chosen: the drafts' names, batch sizes, and where texts are.
      options: how to decode; gamma and batch size are of no account.
      target: the model whose text is wanted.
      texts: inputs, instead of a file or task.
      draft_options: of all drafts.
      report: ``report(done, total, what)`` is told what is being measured.

    Raises:
      InputError: no input, or both texts and a file; a draft that does not go with the
        target; a beam search.
    """
    if options.beams:
        raise InputError(f"beams is {options.beams}: a beam search is not tuned, leave it 0")
    options = dataclasses.replace(options, gamma=1, guard=False)
    tuning = chosen.tuning()
    generator = generator_of(target)
    texts = _texts(chosen, options, generator, texts)[: tuning.num_inputs]
    drafts = {
        name: make_draft(name, target, generator.target, draft_options) for name in chosen.drafts
    }
    measurement = measure(
        generator,
        drafts,
        texts,
        options,
        batch_sizes=chosen.batch_sizes,
        tuning=tuning,
        report=report,
    )
    predictions = predict(measurement, tuning)
    result = TuneResult(
        predictions=predictions,
        chosen=choose(predictions, tuning.margin),
        measured={},
        by_position={n: t.by_position().tolist() for n, t in measurement.traces.items()},
        num_inputs=measurement.num_inputs,
        num_tokens=next(iter(measurement.traces.values())).num_tokens,
        confidence=tuning.confidence,
        compile_seconds=sum(times.compile_seconds for times in measurement.times.values()),
    )
    if not chosen.measure:
        return result
    # Its programs are of no more use, and fill the memory.
    jax.clear_caches()
    measured = _measure(result, generator, drafts, texts, options, chosen.repeats, report)
    return dataclasses.replace(result, measured=measured)


def _measure(
    result: TuneResult,
    generator: Generator,
    drafts: Mapping[str, Draft],
    texts: Sequence[str],
    options: GenerateOptions,
    repeats: int,
    report: Report | None,
) -> dict[Setting, float]:
    """Speed-ups of the best settings, decoded in turn with plain decoding."""
    measured = {}
    for prediction in result.best:
        if report:
            what = f"{prediction.draft}, gamma {prediction.gamma}, batch {prediction.batch_size}"
            report(len(measured), len(result.best), f"decoding with {what}")
        sized = dataclasses.replace(
            options, gamma=prediction.gamma, batch_size=prediction.batch_size
        )
        which = generator.with_draft(drafts[prediction.draft])
        measured[_setting(prediction)] = compare(which, texts, sized, repeats).speed_up
    return measured


def table(result: TuneResult) -> str:
    """The best setting of each draft at each batch size, and the choice, in Markdown."""
    has_measured = bool(result.measured)
    head = ["draft", "batch", "gamma", "speed-up", f"{result.confidence:.0%} interval"]
    head += ["measured", "off by"] if has_measured else []
    head += ["block efficiency", "tokens/s", "c", "T(verify)", "overhead", "set-up¹"]
    lines = [_line(head), _line(["---"] * len(head))]
    for p in sorted(result.best, key=lambda p: (p.batch_size, -p.speed_up)):
        cells = [p.draft, p.batch_size, p.gamma, f"{p.speed_up:.2f}", f"{p.low:.2f}-{p.high:.2f}"]
        if has_measured:
            factor = result.measured[_setting(p)]
            cells += [f"{factor:.2f}", f"{p.speed_up / factor - 1:+.0%}"]
        cells += [f"{p.block_efficiency:.2f}", f"{p.tokens_per_second:.0f}", f"{p.c:.3f}"]
        cells += [f"{p.verification_cost:.2f}", f"{p.overhead:.2f} ms"]
        cells += [f"{p.plain_setup:.1f} -> {p.setup:.1f} ms"]
        lines.append(_line(cells))
    lines += [
        "",
        "¹ What a batch costs before its first token, plainly and with the draft: encoders, "
        "caches, dispatch. c and T(verify) in calls of the target over one token.",
        "",
        choice(result),
    ]
    return "\n".join(lines)


def choice(result: TuneResult) -> str:
    """What was chosen and why, in a sentence."""
    p = result.chosen
    where = f"batch size {p.batch_size}, {p.tokens_per_second:.0f} tokens/s"
    if p.draft is None:
        return f"Best: plain decoding ({where}): no draft is sure to be faster."
    measured = result.measured.get(_setting(p))
    said = f"{p.speed_up:.2f} times plain decoding ({p.low:.2f}-{p.high:.2f})"
    said += "" if measured is None else f", {measured:.2f} measured"
    return f"Best: draft {p.draft}, gamma {p.gamma} ({where}): {said}."


def curves(result: TuneResult) -> str:
    """The predicted speed-up of every gamma, in Markdown."""
    rows: dict[tuple[str, int], list[Prediction]] = {}
    for p in result.predictions:
        if p.draft is not None:
            rows.setdefault((p.draft, p.batch_size), []).append(p)
    gammas = [p.gamma for p in next(iter(rows.values()))]
    lines = [_line(["draft", "batch", *(f"gamma {g}" for g in gammas)])]
    lines.append(_line(["---"] * (2 + len(gammas))))
    for (draft, size), of_row in rows.items():
        lines.append(_line([draft, size, *(f"{p.speed_up:.2f}" for p in of_row)]))
    return "\n".join(lines)


def gin_text(result: TuneResult, models: Mapping[str, Any], options: GenerateOptions) -> str:
    """The choice as a gin file for the other commands.

    Args:
      result: what was found.
      models: the fields of ``Models`` to bind, but for the draft; and ``draft``, which
        stands for none.
      options: how the texts were decoded.
    """
    p, around = result.chosen, machine()
    draft = models["draft"] if p.draft is None else p.draft
    of_models = models | {"draft": draft}
    defaults = dataclasses.asdict(GenerateOptions())
    given = dataclasses.asdict(options) | {"gamma": p.gamma, "batch_size": p.batch_size}
    always = ("gamma", "batch_size")
    of_decoding = {
        name: value
        for name, value in given.items()
        if name != "guard" and (name in always or value != defaults[name])
    }
    drafts = ", ".join(result.by_position)
    sizes = ", ".join(str(size) for size in dict.fromkeys(q.batch_size for q in result.predictions))
    lines = [
        "# The fastest setting that spec-t5x tune found.",
        "#",
        f"# On {around['device']} ({around['processor']}, {around['threads']} threads), JAX "
        f"{around['jax']}.",
        f"# Drafts: {drafts}. Batch sizes: {sizes}. Gammas: 0 to "
        f"{max(q.gamma for q in result.predictions)}. Inputs: {result.num_inputs}, "
        f"{result.num_tokens} tokens.",
        f"# {choice(result)}",
        "#",
        "# Required macros: none.",
        "#",
        '#   spec-t5x generate --gin_file=tuned.gin "..."',
        "",
        *(f"Models.{name} = {value!r}" for name, value in of_models.items()),
        "",
        *(f"GenerateOptions.{name} = {value!r}" for name, value in of_decoding.items()),
    ]
    return "\n".join(lines) + "\n"


def to_dict(result: TuneResult) -> dict:
    """All figures, with the machine, as JSON can hold them."""
    return {
        "machine": machine(),
        "inputs": result.num_inputs,
        "tokens": result.num_tokens,
        "confidence": result.confidence,
        "compile_seconds": result.compile_seconds,
        "acceptance_by_position": {
            without_folder(name): rates for name, rates in result.by_position.items()
        },
        "chosen": _as_dict(result, result.chosen),
        "predictions": [_as_dict(result, prediction) for prediction in result.predictions],
    }


def _as_dict(result: TuneResult, prediction: Prediction) -> dict:
    draft = prediction.draft and without_folder(prediction.draft)
    measured = result.measured.get(_setting(prediction))
    return dataclasses.asdict(prediction) | {"draft": draft, "measured": measured}


def _setting(prediction: Prediction) -> Setting:
    return prediction.draft, prediction.gamma, prediction.batch_size


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _texts(
    chosen: TuneRun, options: GenerateOptions, generator: Generator, texts: Sequence[str]
) -> list[str]:
    has_source = chosen.data or chosen.mixture_or_task
    if texts and has_source:
        raise InputError(f"both TEXT and {has_source} were given: give one of them")
    if texts:
        for text in texts:
            generator.tokenize(text, options)
        return list(texts)
    chosen.check_given()
    return read_texts(chosen, generator, options, chosen.num_inputs)
