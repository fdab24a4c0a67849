"""BLEU and ROUGE as metrics by name, with 95 % intervals and signatures.

A metric is ``metric(targets, predictions) -> {name: value in 0..100}``: the arguments' names
are those that seqio asks of a task's metric functions.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from spec_t5x.errors import InputError, check_choice
from spec_t5x.machine.extras import needed

Metric = Callable[[Sequence[Any], Sequence[str]], dict[str, float]]

# What T5 reports of summaries.
ROUGE_KEYS = ("rouge1", "rouge2", "rougeLsum")
_RESAMPLINGS = 1000


def bleu_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """sacreBLEU (cased, exponential smoothing) with WMT's tokenisation.

    Raises:
        InputError: there is nothing to score or the numbers differ.
    """
    return {"bleu": _bleu(targets, predictions, "13a").score}


def bleu_intl_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """``bleu_metric`` with sacreBLEU's international tokenisation, which T5 reports."""
    return {"bleu": _bleu(targets, predictions, "intl").score}


def rouge_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """ROUGE as T5 reports it: F1 of 1-grams, 2-grams and sentences' common subsequences
    (``rougeLsum``, one sentence a line).

    Each figure is the median of 1000 resamplings of the corpus, by the rouge-score
    package without stemming. T5 draws new ones each time; here the same texts always
    score the same.

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
    """One of ``METRICS``.

    Raises:
        InputError: no such name.
    """
    check_choice("metric", name, METRICS)
    return METRICS[name]


def check_installed(metrics: Iterable[Callable]) -> None:
    """Raises ``InputError`` where a package that one of the metrics takes is not installed."""
    for metric in metrics:
        if metric in _TOKENIZERS:
            _sacrebleu()
        elif metric is rouge_metric:
            _rouge_score()


def metric_intervals(
    metric: Callable, targets: Sequence[Any], predictions: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """95 % intervals of a metric's figures, over resamplings of the texts.

    BLEU's are sacreBLEU's own and ROUGE's rouge-score's, both from 1000 resamplings.
    Other metrics than ``METRICS`` have none, nor has a single text.
    """
    if len(targets) < 2:
        return {}
    if metric is rouge_metric:
        return {name: (low, high) for name, (low, _, high) in _rouge(targets, predictions).items()}
    if metric in _TOKENIZERS:
        score = _bleu(targets, predictions, _TOKENIZERS[metric], n_bootstrap=_RESAMPLINGS)
        # Public is only how it prints them.
        return {"bleu": (score._mean - score._ci, score._mean + score._ci)}
    return {}


def signature(metric: Callable) -> str | None:
    """What it takes to reproduce a metric: sacreBLEU's signature, None for any other."""
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
    """sacreBLEU's score."""
    _check_numbers(targets, predictions)
    scorer = _sacrebleu().metrics.BLEU(tokenize=tokenize)
    return scorer.corpus_score(list(predictions), [list(targets)], **options)


def _rouge(targets, predictions) -> dict[str, tuple[float, float, float]]:
    """Lower end, median and upper end of each figure."""
    _check_numbers(targets, predictions)
    rouge_scorer, scoring = _rouge_score()
    scorer = rouge_scorer.RougeScorer(list(ROUGE_KEYS))
    aggregator = scoring.BootstrapAggregator()
    for target, prediction in zip(targets, predictions, strict=True):
        aggregator.add_scores(scorer.score(_as_lines(target), _as_lines(prediction)))
    with _numpy_seed(0):
        found = aggregator.aggregate()
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


def _as_lines(summary: str) -> str:
    """A sentence a line, where spaces around a full stop show its end."""
    return summary.replace(" . ", " .\n")


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seeds numpy's global generator, which rouge-score draws from, and restores it."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)
