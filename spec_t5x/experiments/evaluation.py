"""Quality and acceptance of a pair over a file of text pairs or a seqio task."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import gin
import numpy as np

from spec_t5x.data.jsonl import read_json_pairs
from spec_t5x.data.metrics import bleu_metric, metric_by_name, metric_intervals, signature
from spec_t5x.data.task_options import TaskOptions
from spec_t5x.data.text_files import is_jsonl
from spec_t5x.data.tsv import read_pairs
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generation, Generator, all_answered
from spec_t5x.theory.estimates import Bootstrap, ratio
from spec_t5x.theory.formulas import conditional_acceptance

# ``metric(targets, predictions)``; targets are what came as the second of each pair.
EvaluationMetric = Callable[[Sequence[Any], Sequence[str]], dict[str, float]]
# The 95 % intervals of the same arguments, of the figures of which they are known.
EvaluationIntervals = Callable[[Sequence[Any], Sequence[str]], dict[str, tuple[float, float]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions(TaskOptions):
    """What to evaluate on: a local file or a seqio task."""

    # Pairs: .tsv, or .jsonl for JSON lines; gzipped or not.
    data: str | None = None
    # Of a .tsv; None is as usual (``data.tsv.read_pairs``).
    source_column: int | None = None
    target_column: int | None = None
    num_columns: int | None = None
    # The same of JSON lines.
    source_field: str = "article"
    target_field: str = "highlights"
    # Put before every source of a file; a task has its own.
    prefix: str = ""
    # Of a file: a name of ``data.metrics.METRICS``. A task has its own.
    metric: str = "bleu"
    # A name in seqio's registry: its texts and its metrics.
    mixture_or_task: str | None = None
    split: str = "validation"
    # Modules that register tasks when imported; the paper's tasks are known without.
    # T5X's macro holds one name or None.
    task_modules: tuple | str | None = ()
    # As T5X's macro: sources are cut to ``inputs`` tokens, outputs end after ``targets``.
    task_feature_lengths: dict | None = None
    # Take the first so many pairs only.
    limit: int | None = None
    # Of a file: take the first so many words of each source only, which a language model is
    # to go on from.
    source_words: int | None = None

    def __post_init__(self):
        if (self.data is None) == (self.mixture_or_task is None):
            raise InputError(
                f"data is {self.data!r} and mixture_or_task {self.mixture_or_task!r}: give one "
                "of them"
            )
        for name in ("limit", "source_words"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}: give at least 1")
        if self.source_words is not None and self.data is None:
            raise InputError(
                f"source_words is {self.source_words}: a task has its own sources, leave it out"
            )
        self.check_lengths()
        metric_by_name(self.metric)


gin.external_configurable(EvaluationOptions, module="spec_t5x")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """Sources, what their outputs are compared with, and how."""

    # Of the file or task, for the report.
    name: str
    # (source, target); a target is what ``metric`` takes.
    pairs: list[tuple[str, Any]]
    metric: EvaluationMetric
    # Of the metric's figures.
    intervals: EvaluationIntervals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a set of text pairs says about a target and its draft."""

    num_pairs: int
    # Pairs left out because their source is empty or longer than the encoder.
    num_skipped: int
    # Of the decoded text: {"bleu": 27.3}, or what the task's own metrics return.
    metrics: dict[str, float]
    # sacreBLEU's, of the "bleu" of a file.
    bleu_signature: str | None
    # Generated tokens, end of sequence included.
    num_tokens: int
    target_calls: int
    # Over all sequences; None in plain decoding. Generated tokens for each target call.
    block_efficiency: float | None
    alpha: float | None
    # How often the i-th draft was accepted where it was verified.
    acceptance_by_position: list[float] | None
    # Lower and upper ends of the 95 % intervals, bootstrapped over texts, by the names of
    # the figures; those that can be had.
    intervals: dict[str, tuple[float, float]]

    def to_dict(self) -> dict:
        """All of it as JSON can hold it, the metrics among the other figures."""
        fields = dataclasses.asdict(self)
        metrics = fields.pop("metrics")
        fields["intervals"] = {name: list(ends) for name, ends in self.intervals.items()}
        if self.bleu_signature is None:
            del fields["bleu_signature"]
        return metrics | fields


def read_sets(options: EvaluationOptions, vocabulary: Vocabulary) -> list[EvaluationSet]:
    """The file, the task, or each task of the mixture.

    Raises:
      InputError: it cannot be read.
    """
    if options.data is not None:
        return [_read_file(options)]
    # Imported here: seqio brings TensorFlow along, seconds that a file does not need.
    from spec_t5x.data.task_examples import read_task

    tasks = read_task(
        options.mixture_or_task,
        options.split,
        vocabulary,
        lengths=options.task_feature_lengths,
        limit=options.limit,
        modules=options.modules,
    )
    return [
        EvaluationSet(
            name=task.name,
            pairs=[(example.source, example) for example in task.examples],
            metric=task.score,
            intervals=task.intervals,
        )
        for task in tasks
    ]


def evaluate(
    generator: Generator,
    pairs: Sequence[tuple[str, Any]],
    options: GenerateOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    metric: EvaluationMetric = bleu_metric,
    intervals: EvaluationIntervals | None = None,
) -> Evaluation:
    """Decodes the sources and scores the outputs against the targets.

    Args:
      generator: decodes speculatively if it has a draft.
      pairs: ``(source, target)``.
      options: ``num_decodes`` must be 1. Batches are filled with sources of about
        one length, which changes no output.
      progress: called with the number of inputs done and their total.
      metric: of the targets and outputs, in the order of the pairs.
      intervals: of the metric; None takes ``data.metrics.metric_intervals``.

    Raises:
      InputError: no pair can be decoded, one was decoded to no text, ``num_decodes`` is not
        1, or a beam search.
    """
    if options.num_decodes != 1:
        raise InputError(f"num_decodes is {options.num_decodes}: an evaluation is of 1 output")
    if options.beams:
        raise InputError(f"beams is {options.beams}: an evaluation does not search, leave it 0")
    usable = [pair for pair in pairs if fits(generator, pair[0], options)]
    if not usable:
        raise InputError(f"none of {len(pairs)} sources can be decoded: give a file with text")
    outputs = []
    for (output,) in all_answered(generator.generate([source for source, _ in usable], options)):
        outputs.append(output)
        progress(len(outputs), len(usable))
    texts = [output.output for output in outputs]
    targets = [target for _, target in usable]
    intervals = intervals or functools.partial(metric_intervals, metric)
    acceptance, of_acceptance = _acceptance(outputs)
    return Evaluation(
        num_pairs=len(usable),
        num_skipped=len(pairs) - len(usable),
        metrics=metric(targets, texts),
        bleu_signature=signature(metric),
        num_tokens=sum(len(g.output_ids) for g in outputs),
        target_calls=sum(g.target_calls for g in outputs),
        **acceptance,
        intervals=intervals(targets, texts) | of_acceptance,
    )


def _read_file(options: EvaluationOptions) -> EvaluationSet:
    if is_jsonl(options.data):
        pairs = read_json_pairs(options.data, options.source_field, options.target_field)
    else:
        columns = (options.source_column, options.target_column, options.num_columns)
        pairs = read_pairs(options.data, *columns)
    if options.source_words is not None:
        first = options.source_words
        pairs = ((" ".join(source.split()[:first]), target) for source, target in pairs)
    # An empty source stays empty, to be skipped.
    pairs = [(options.prefix + source if source else "", target) for source, target in pairs]
    return EvaluationSet(
        name=options.data,
        pairs=pairs[: options.limit],
        metric=metric_by_name(options.metric),
        intervals=functools.partial(metric_intervals, metric_by_name(options.metric)),
    )


def fits(generator: Generator, source: str, options: GenerateOptions) -> bool:
    """Whether the source is one that the generator decodes."""
    try:
        generator.tokenize(source, options)
    except InputError:
        return False
    return True


def _acceptance(
    outputs: Sequence[Generation],
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """The figures of acceptance by name, and their intervals."""
    drafted = [output for output in outputs if output.proposed is not None]
    if not drafted:
        names = ("block_efficiency", "alpha", "acceptance_by_position")
        return dict.fromkeys(names), {}
    accepted, verified = (
        np.array([getattr(output, name) for output in drafted])
        for name in ("accepted_by_position", "verified_by_position")
    )
    betas = np.array([output.alpha or 0.0 for output in drafted]) * verified.sum(axis=1)
    lengths, calls = (
        np.array(values)
        for values in zip(*((len(o.output_ids), o.target_calls) for o in outputs), strict=True)
    )
    resampling = Bootstrap()
    estimates = {
        "block_efficiency": ratio(lengths, calls, resampling),
        "alpha": ratio(betas, verified.sum(axis=1), resampling),
    }
    figures = {name: each and each.value for name, each in estimates.items()}
    figures["acceptance_by_position"] = conditional_acceptance(
        accepted.sum(axis=0), verified.sum(axis=0)
    ).tolist()
    intervals = {
        name: (each.low, each.high)
        for name, each in estimates.items()
        if each and each.low is not None
    }
    return figures, intervals
