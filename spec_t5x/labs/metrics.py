"""Metrics by name: their 95 % intervals, signatures, and whether their packages are installed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spec_t5x.data.metrics import bleu_intl_metric, bleu_score, rouge_metric, rouge_scores
from spec_t5x.errors import check_choice
from spec_t5x.machine.extras import imported

Metric = Callable[[Sequence[Any], Sequence[str]], dict[str, float]]

_RESAMPLINGS = 1000


def bleu_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Computes sacreBLEU (cased, exponential smoothing) with WMT's tokenisation, 13a.

    Raises ``InputError`` unless there are targets, and one prediction for each.
    """
    return {"bleu": bleu_score(targets, predictions, "13a").score}


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
