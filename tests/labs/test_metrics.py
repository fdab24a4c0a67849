"""Intervals and signatures of metrics."""

import pytest

from spec_t5x.labs.metrics import METRICS, metric_intervals, signature


@pytest.mark.parametrize("name", METRICS)
def test_intervals_hold_the_figures_and_narrow_with_more_texts(name):
    metric = METRICS[name]
    references = ["the old cat sat still on a red mat", "a dog barks at the man", "it rains"] * 3
    texts = ["the old cat sat down on a red mat", "a cat barks at the men", "it rains"] * 3
    few, many = (metric_intervals(metric, references * n, texts * n) for n in (1, 9))
    scores = metric(references, texts)
    assert few.keys() == many.keys() == scores.keys()
    for key, (low, high) in few.items():
        assert 0 <= low < scores[key] < high <= 100
        assert many[key][1] - many[key][0] < 0.6 * (high - low)
    assert metric_intervals(metric, references, texts) == few


@pytest.mark.parametrize(
    ("name", "tokenize"), [("bleu", "tok:13a"), ("bleu_intl", "tok:intl"), ("rouge", None)]
)
def test_signatures_are_sacrebleus(name, tokenize):
    found = signature(METRICS[name])
    assert found is None if tokenize is None else tokenize in found.split("|")
