"""Metrics against values computed by hand or by the libraries; their intervals and signatures."""

import numpy as np
import pytest
import sacrebleu

from spec_t5x.errors import InputError
from spec_t5x.labs.metrics import METRICS, metric_by_name, metric_intervals, signature

# "intl" parts every symbol from its word, "13a" does not.
REFERENCES = ["Das kostet 5€ pro Tag – immer.", "Die Katze schläft unter dem alten Tisch."]
HYPOTHESES = ["Das kostet 5 € pro Tag – immer.", "Die Katze schläft unter einem alten Tisch."]


@pytest.mark.parametrize(("name", "tokenize"), [("bleu", "13a"), ("bleu_intl", "intl")])
def test_bleu_is_sacrebleus_with_that_tokenisation(name, tokenize):
    # The call that T5's own metric makes.
    expected = sacrebleu.corpus_bleu(
        HYPOTHESES,
        [REFERENCES],
        smooth_method="exp",
        smooth_value=0.0,
        force=False,
        lowercase=False,
        tokenize=tokenize,
        use_effective_order=False,
    ).score
    metric = metric_by_name(name)
    assert metric(REFERENCES, HYPOTHESES) == {"bleu": pytest.approx(expected)}
    assert 0 < expected < 100


def rouge(references, texts):
    return METRICS["rouge"](references, texts)


def test_rouge_by_hand():
    # 3 of 4 words shared; 2 of 3 pairs of them.
    scores = rouge(["the cat sat still"], ["the cat sat down"])
    expected = {"rouge1": 100 * 3 / 4, "rouge2": 100 * 2 / 3, "rougeLsum": 100 * 3 / 4}
    assert scores == pytest.approx(expected)
    # Sentences in another order share all their words in order, each by itself.
    swapped = ["a b c . d e f ."], ["d e f . a b c ."]
    assert rouge(*swapped)["rougeLsum"] == pytest.approx(100.0)
    one_line = [[text.replace(" . ", " ") for text in texts] for texts in swapped]
    assert rouge(*one_line)["rougeLsum"] == pytest.approx(50.0)


def test_rouge_is_the_mean_of_the_texts_and_the_same_each_time():
    given = ["the cat sat still", "a dog barks"], ["the cat sat down", "a dog barks"]
    np.random.seed(7)
    before = np.random.get_state()[1].copy()
    scores = rouge(*given)
    # The median of resampled means of 75 and 100.
    assert scores["rouge1"] == pytest.approx(87.5)
    assert rouge(*given) == scores
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_other_numbers_of_texts_are_refused(metric):
    with pytest.raises(InputError, match="1 hypotheses for 2 references"):
        metric(["a", "b"], ["a"])
    with pytest.raises(InputError, match="0 hypotheses"):
        metric([], [])


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
