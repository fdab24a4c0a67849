"""BLEU and ROUGE as metrics by name, with 95 % intervals and signatures.

A metric is ``metric(targets, predictions) -> {name: value in 0..100}``: the arguments have the
names of seqio's metric functions.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from spec_t5x.errors import InputError, check_choice
from spec_t5x.machine.extras import needed

Metric = Callable[[Sequence[Any], Sequence[str]], dict[str, float]]

# The figures that T5 reports for summaries.
ROUGE_KEYS = ("rouge1", "rouge2", "rougeLsum")
_RESAMPLINGS = 1000


def bleu_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Computes sacreBLEU (cased, exponential smoothing) with WMT's tokenisation.

    Raises:
        InputError: there is nothing to score or the numbers differ.
    """
    return {"bleu": _bleu(targets, predictions, "13a").score}


def bleu_intl_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Computes sacreBLEU with its international tokenisation, which T5 reports."""
    return {"bleu": _bleu(targets, predictions, "intl").score}


def rouge_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Computes ROUGE as T5 reports it: F1 of 1-grams, 2-grams and sentences' common subsequences.

    The last (``rougeLsum``) takes one sentence a line. Each figure is the median of 1000
    resamplings of the corpus, by the rouge-score package without stemming. T5 draws new ones each
    time; here the same texts always score the same.

    Raises:
        InputError: there is nothing to score or the numbers differ.
    """
    return {name: mid for name, (_, mid, _) in _rouge(targets, predictions).items()}


METRICS: dict[str, Metric] = {
    "bleu": bleu_metric,
    "bleu_intl": bleu_intl_metric,
    "rouge": rouge_metric,
}
_TOKENIZERS = {bleu_metric: "13a", bleu_intl_metric: "intl"}


def metric_by_name(name: str) -> Metric:
    """Returns one of ``METRICS``.

    Raises:
        InputError: an unknown name.
    """
    check_choice("metric", name, METRICS)
    return METRICS[name]


def check_installed(metrics: Iterable[Callable]) -> None:
    """Raises ``InputError`` where a package that one of the metrics uses is not installed."""
    for metric in metrics:
        if metric in _TOKENIZERS:
            _sacrebleu()
        elif metric is rouge_metric:
            _rouge_score()


def metric_intervals(
    metric: Callable, targets: Sequence[Any], predictions: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Computes 95 % intervals of a metric's figures, over resamplings of the texts.

    BLEU's are sacreBLEU's own and ROUGE's rouge-score's, both from 1000 resamplings. Other metrics
    than ``METRICS`` have none, nor has a single text.
    """
    if len(targets) < 2:
        return {}
    if metric is rouge_metric:
        return {name: (low, high) for name, (low, _, high) in _rouge(targets, predictions).items()}
    if metric in _TOKENIZERS:
        score = _bleu(targets, predictions, _TOKENIZERS[metric], n_bootstrap=_RESAMPLINGS)
        # Only the printed form is public.
        return {"bleu": (score._mean - score._ci, score._mean + score._ci)}
    return {}


def signature(metric: Callable) -> str | None:
    """Returns sacreBLEU's signature, which makes a figure reproducible; None for other metrics."""
    if metric not in _TOKENIZERS:
        return None
    scorer = _sacrebleu().metrics.BLEU(tokenize=_TOKENIZERS[metric])
    # It has none before it has scored something.
    scorer.corpus_score(["x"], [["x"]])
    return str(scorer.get_signature())


def _sacrebleu():
    with needed("sacrebleu"):
        import sacrebleu
    return sacrebleu


def _rouge_score():
    # It brings NLTK along, half a second that only summaries need.
    with needed("rouge_score"):
        from rouge_score import rouge_scorer, scoring
    return rouge_scorer, scoring


def _bleu(targets, predictions, tokenize: str, **options):
    _check_numbers(targets, predictions)
    scorer = _sacrebleu().metrics.BLEU(tokenize=tokenize)
    return scorer.corpus_score(list(predictions), [list(targets)], **options)


def _rouge(targets, predictions) -> dict[str, tuple[float, float, float]]:
    """Computes lower end, median and upper end of each figure."""
    _check_numbers(targets, predictions)
    rouge_scorer, scoring = _rouge_score()
    scorer = rouge_scorer.RougeScorer(list(ROUGE_KEYS))
    aggregator = scoring.BootstrapAggregator()
    for pair in zip(targets, predictions, strict=True):
        # A sentence a line, where spaces around a full stop show its end.
        aggregator.add_scores(scorer.score(*(text.replace(" . ", " .\n") for text in pair)))
    # rouge-score draws from numpy's global generator.
    state = np.random.get_state()
    np.random.seed(0)
    try:
        found = aggregator.aggregate()
    finally:
        np.random.set_state(state)
    return {
        key: tuple(
            100.0 * float(score.fmeasure)
            for score in (found[key].low, found[key].mid, found[key].high)
        )
        for key in ROUGE_KEYS
    }


def _check_numbers(targets: Sequence[Any], predictions: Sequence[str]) -> None:
    if not targets or len(predictions) != len(targets):
        raise InputError(
            f"{len(predictions)} hypotheses for {len(targets)} references: give one for each"
        )
