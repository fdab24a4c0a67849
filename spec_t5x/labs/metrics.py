"""Metrics by name, as T5 reports them: scores, 95 % intervals, signatures, installed packages.

A metric is ``metric(targets, predictions) -> {figure: value in 0..100}``, seqio's signature:
``targets`` are the references and ``predictions`` the model's outputs, one for each reference.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from spec_t5x.errors import InputError, check_choice
from spec_t5x.machine.extras import imported

Metric = Callable[[Sequence[Any], Sequence[str]], dict[str, float]]
# ``intervals(targets, predictions)``: confidence intervals by figure, of figures that have one.
Intervals = Callable[[Sequence[Any], Sequence[str]], dict[str, tuple[float, float]]]

_RESAMPLINGS = 1000
# The figures that T5 reports for summaries.
ROUGE_KEYS = ("rouge1", "rouge2", "rougeLsum")


def bleu_intl_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Computes BLEU as T5 reports it: sacreBLEU with its ``intl`` tokenisation.

    Raises ``InputError`` unless there are targets, and one prediction for each.
    """
    return {"bleu": bleu_score(targets, predictions, "intl").score}


def rouge_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Computes ROUGE as T5 reports it: ``rouge1``, ``rouge2`` and ``rougeLsum``, each an F1.

    ``rougeLsum`` (longest common subsequences) expects one sentence per line. The rouge-score
    package computes each figure, without stemming, as the median over 1000 resamplings of the
    texts. Unlike in T5, their seed is fixed: the same texts always have the same score. Raises
    ``InputError`` unless there are targets, and one prediction for each.
    """
    return {name: mid for name, (_, mid, _) in rouge_scores(targets, predictions).items()}


def bleu_score(
    targets: Sequence[str], predictions: Sequence[str], tokenize: str, **options: Any
) -> Any:
    """Returns sacreBLEU's ``BLEUScore``; ``options`` are those of its ``corpus_score``."""
    _check_numbers(targets, predictions)
    scorer = imported("sacrebleu").metrics.BLEU(tokenize=tokenize)
    return scorer.corpus_score(list(predictions), [list(targets)], **options)


def rouge_scores(
    targets: Sequence[str], predictions: Sequence[str]
) -> dict[str, tuple[float, float, float]]:
    """Returns (low, median, high) of each of ``ROUGE_KEYS``, in 0..100."""
    _check_numbers(targets, predictions)
    scorer = imported("rouge_score.rouge_scorer").RougeScorer(list(ROUGE_KEYS))
    aggregator = imported("rouge_score.scoring").BootstrapAggregator()
    for pair in zip(targets, predictions, strict=True):
        # rougeLsum splits sentences at newlines; CNN/DailyMail ends them with " . ".
        aggregator.add_scores(scorer.score(*(text.replace(" . ", " .\n") for text in pair)))
    # rouge-score resamples with numpy's global generator, whose state the caller keeps.
    state = np.random.get_state()
    np.random.seed(0)
    try:
        found = aggregator.aggregate()
    finally:
        np.random.set_state(state)
    return {key: tuple(100.0 * float(score.fmeasure) for score in found[key]) for key in ROUGE_KEYS}


def _check_numbers(targets: Sequence[Any], predictions: Sequence[str]) -> None:
    if not targets or len(predictions) != len(targets):
        raise InputError(
            f"{len(predictions)} hypotheses for {len(targets)} references: give one for each"
        )


def bleu_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Computes sacreBLEU (cased, exponential smoothing) with WMT's tokenisation, 13a.

    Raises ``InputError`` unless there are targets, and one prediction for each.
    """
    return {"bleu": bleu_score(targets, predictions, "13a").score}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPairs:
    """Text pairs of a file or of one task, with their metric."""

    name: str = ""
    # (source, target); a target is what ``metric`` takes, and ``str`` returns its text.
    pairs: Sequence[tuple[str, Any]]
    metric: Metric = bleu_metric
    # Token ids of the sources, EOS included; None tokenizes the texts.
    ids: Sequence[list[int]] | None = None
    # None takes ``metric_intervals``.
    intervals: Intervals | None = None


METRICS: dict[str, Metric] = {
    "bleu": bleu_metric,
    "bleu_intl": bleu_intl_metric,
    "rouge": rouge_metric,
}
_BLEU_TOKENIZERS = {bleu_metric: "13a", bleu_intl_metric: "intl"}


def metric_by_name(name: str) -> Metric:
    """Returns the function of a name in ``METRICS``; raises ``InputError`` for other names."""
    check_choice("metric", name, METRICS)
    return METRICS[name]


def check_installed(metrics: Iterable[Callable]) -> None:
    """Raises ``InputError`` if a package that one of the metrics needs is missing."""
    for metric in metrics:
        if metric in _BLEU_TOKENIZERS:
            imported("sacrebleu")
        elif metric is rouge_metric:
            # The import loads NLTK, which takes half a second and which only ROUGE needs.
            imported("rouge_score.rouge_scorer")


def metric_intervals(
    metric: Callable, targets: Sequence[Any], predictions: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Computes the 95 % interval (low, high) of each of a metric's figures, in 0..100.

    sacreBLEU and rouge-score resample the texts 1000 times. The result is empty for fewer than two
    targets, and for a metric that is not in ``METRICS``.
    """
    if len(targets) < 2:
        return {}
    if metric is rouge_metric:
        return {
            name: (low, high) for name, (low, _, high) in rouge_scores(targets, predictions).items()
        }
    if metric in _BLEU_TOKENIZERS:
        score = bleu_score(targets, predictions, _BLEU_TOKENIZERS[metric], n_bootstrap=_RESAMPLINGS)
        # sacreBLEU has no public name for these: it only prints them.
        return {"bleu": (score._mean - score._ci, score._mean + score._ci)}
    return {}


def signature(metric: Callable) -> str | None:
    """Returns sacreBLEU's signature, which makes a figure reproducible; None for other metrics."""
    if metric not in _BLEU_TOKENIZERS:
        return None
    scorer = imported("sacrebleu").metrics.BLEU(tokenize=_BLEU_TOKENIZERS[metric])
    # A scorer has no signature before its first score.
    scorer.corpus_score(["x"], [["x"]])
    return str(scorer.get_signature())
