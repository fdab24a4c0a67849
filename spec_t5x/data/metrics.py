"""BLEU and ROUGE, as scores with a signature and as metrics by name.

A metric is ``metric(targets, predictions) -> {name: value}``: the arguments' names are
those that seqio asks of a task's metric functions.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import sacrebleu

from spec_t5x.errors import InputError

Metric = Callable[[Sequence[str], Sequence[str]], dict[str, float]]

# What T5 reports of summaries.
ROUGE_KEYS = ("rouge1", "rouge2", "rougeLsum")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BleuScore:
    """Corpus BLEU."""

    score: float  # 0..100
    signature: str  # sacreBLEU's: tokenisation, smoothing, version
    num_sentences: int


def bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a"
) -> BleuScore:
    """sacreBLEU (cased, exponential smoothing), with one reference a sentence.

    Args:
        hypotheses, references: one for each.
        tokenize: sacreBLEU's name: "13a", WMT's, or "intl", which T5 reports.

    Raises:
        InputError: there is nothing to score or the numbers differ.
    """
    _check_numbers(hypotheses, references)
    metric = sacrebleu.metrics.BLEU(tokenize=tokenize)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return BleuScore(
        score=score.score,
        signature=str(metric.get_signature()),
        num_sentences=len(references),
    )


def rouge(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE as T5 reports it: F1 in 0..100 of 1-grams, 2-grams and sentences' common
    subsequences (``rougeLsum``, one sentence a line).

    Each figure is the median of 1000 resamplings of the corpus, by the rouge-score
    package without stemming. T5 draws them anew each time; here the same texts always
    score the same.

    Raises:
        InputError: there is nothing to score or the numbers differ.
    """
    return {name: score.mid for name, score in _rouge(hypotheses, references).items()}


@dataclasses.dataclass(frozen=True)
class _Resampled:
    """Median and 95 % interval of resamplings of a corpus."""

    low: float
    mid: float
    high: float


def _rouge(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, _Resampled]:
    _check_numbers(hypotheses, references)
    # Imported here: it brings NLTK along, half a second that only summaries need.
    from rouge_score import rouge_scorer, scoring

    scorer = rouge_scorer.RougeScorer(list(ROUGE_KEYS))
    aggregator = scoring.BootstrapAggregator()
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        aggregator.add_scores(scorer.score(_as_lines(reference), _as_lines(hypothesis)))
    with _numpy_seed(0):
        result = aggregator.aggregate()

    def percent(score) -> float:
        return 100.0 * float(score.fmeasure)

    return {
        key: _Resampled(*(percent(getattr(result[key], part)) for part in ("low", "mid", "high")))
        for key in ROUGE_KEYS
    }


def bleu_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """``bleu`` with WMT's tokenisation."""
    return {"bleu": bleu(predictions, targets).score}


def bleu_intl_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """``bleu`` as T5 reports it: sacreBLEU's international tokenisation."""
    return {"bleu": bleu(predictions, targets, tokenize="intl").score}


def rouge_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """``rouge``."""
    return rouge(predictions, targets)


def metric_intervals(
    metric: Callable, targets: Sequence[str], predictions: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """95 % intervals of a metric's figures, over resamplings of the texts.

    BLEU's are sacreBLEU's own and ROUGE's rouge-score's, both from 1000 resamplings.
    Nothing is known of other metrics than those of ``METRICS``, nor of a single text.
    """
    if len(targets) < 2:
        return {}
    if metric is rouge_metric:
        scores = _rouge(predictions, targets)
        return {name: (score.low, score.high) for name, score in scores.items()}
    for ours, tokenize in _BLEUS:
        if metric is ours:
            score = sacrebleu.metrics.BLEU(tokenize=tokenize).corpus_score(
                list(predictions), [list(targets)], n_bootstrap=_RESAMPLINGS
            )
            # Public is only how it prints them.
            return {"bleu": (score._mean - score._ci, score._mean + score._ci)}
    return {}


_RESAMPLINGS = 1000
_BLEUS = ((bleu_metric, "13a"), (bleu_intl_metric, "intl"))

METRICS: dict[str, Metric] = {
    "bleu": bleu_metric,
    "bleu_intl": bleu_intl_metric,
    "rouge": rouge_metric,
}


def metric_by_name(name: str) -> Metric:
    """One of ``METRICS``.

    Raises:
        InputError: no such name.
    """
    if name not in METRICS:
        raise InputError(f"no metric {name!r}: choose one of {', '.join(METRICS)}")
    return METRICS[name]


def signature(metric: Callable) -> str | None:
    """What it takes to reproduce a metric: sacreBLEU's signature, None of anything else."""
    for ours, tokenize in _BLEUS:
        if metric is ours:
            # The same for all texts.
            return bleu(["x"], ["x"], tokenize=tokenize).signature
    return None


def _check_numbers(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if not references or len(hypotheses) != len(references):
        raise InputError(
            f"{len(hypotheses)} hypotheses for {len(references)} references: give one for each"
        )


def _as_lines(summary: str) -> str:
    """A sentence a line, where spaces around a full stop show its end."""
    return summary.replace(" . ", " .\n")


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seeds numpy's global generator, which rouge-score draws from, and puts it back."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)
