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
    _check_numbers(hypotheses, references)
    # Imported here: it brings NLTK along, half a second that only summaries need.
    from rouge_score import rouge_scorer, scoring

    scorer = rouge_scorer.RougeScorer(list(ROUGE_KEYS))
    aggregator = scoring.BootstrapAggregator()
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        aggregator.add_scores(scorer.score(_as_lines(reference), _as_lines(hypothesis)))
    with _numpy_seed(0):
        result = aggregator.aggregate()
    return {key: 100.0 * float(result[key].mid.fmeasure) for key in ROUGE_KEYS}


def bleu_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """``bleu`` with WMT's tokenisation."""
    return {"bleu": bleu(predictions, targets).score}


def bleu_intl_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """``bleu`` as T5 reports it: sacreBLEU's international tokenisation."""
    return {"bleu": bleu(predictions, targets, tokenize="intl").score}


def rouge_metric(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """``rouge``."""
    return rouge(predictions, targets)


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
    for ours, tokenize in ((bleu_metric, "13a"), (bleu_intl_metric, "intl")):
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
