"""95 % intervals and signatures of ``data.metrics``, and whether their packages are installed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spec_t5x.data.metrics import (
    BLEU_TOKENIZERS,
    bleu_score,
    import_rouge_score,
    import_sacrebleu,
    rouge_metric,
    rouge_scores,
)

_RESAMPLINGS = 1000


def check_installed(metrics: Iterable[Callable]) -> None:
    """Raises ``InputError`` if a package that one of ``data.metrics`` needs is missing."""
    for metric in metrics:
        if metric in BLEU_TOKENIZERS:
            import_sacrebleu()
        elif metric is rouge_metric:
            import_rouge_score()


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
    if metric in BLEU_TOKENIZERS:
        score = bleu_score(targets, predictions, BLEU_TOKENIZERS[metric], n_bootstrap=_RESAMPLINGS)
        # sacreBLEU has no public name for these: it only prints them.
        return {"bleu": (score._mean - score._ci, score._mean + score._ci)}
    return {}


def signature(metric: Callable) -> str | None:
    """Returns sacreBLEU's signature, which makes a figure reproducible; None for other metrics."""
    if metric not in BLEU_TOKENIZERS:
        return None
    scorer = import_sacrebleu().metrics.BLEU(tokenize=BLEU_TOKENIZERS[metric])
    # A scorer has no signature before its first score.
    scorer.corpus_score(["x"], [["x"]])
    return str(scorer.get_signature())
