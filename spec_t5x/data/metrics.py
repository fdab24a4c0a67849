"""BLEU, with what it takes to reproduce it."""

import dataclasses
from collections.abc import Sequence

import sacrebleu

from spec_t5x.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class BleuScore:
    """Corpus BLEU."""

    score: float  # 0..100
    signature: str  # sacreBLEU's: tokenisation, smoothing, version
    num_sentences: int


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> BleuScore:
    """sacreBLEU (13a tokenisation, cased), with one reference a sentence.

    Raises:
        InputError: there is nothing to score or the numbers differ.
    """
    if not references or len(hypotheses) != len(references):
        raise InputError(
            f"{len(hypotheses)} hypotheses for {len(references)} references: give one for each"
        )
    metric = sacrebleu.metrics.BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return BleuScore(
        score=score.score,
        signature=str(metric.get_signature()),
        num_sentences=len(references),
    )
