"""Scores and acceptance of outputs beside references."""

import dataclasses

import numpy as np
import pytest
import sacrebleu

from spec_t5x.data.vocabulary import SentencePieceVocabulary
from spec_t5x.labs.benchmark.evaluation import evaluate
from spec_t5x.labs.metrics import TextPairs
from spec_t5x.types import EOS_ID
from tests.checkpoints.faults import message_of
from tests.generation.cases import TEXTS, options

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

SKIPPED = [("", "nichts"), ("Es regnet. " * 20, "zu lang")]


class SpacedVocabulary(SentencePieceVocabulary):
    """Vocabulary of words, because the tiny pair's texts have too few for BLEU."""

    def decode(self, ids):
        return " ".join(str(i) for i in ids if i != EOS_ID)


def test_evaluation_scores_each_output_against_its_own_reference(generator, greedy_alone):
    """The order of batches does not matter; unusable pairs are counted."""
    spaced = SpacedVocabulary(generator.vocabulary.path)
    generator = dataclasses.replace(generator, vocabulary=spaced)
    outputs = [greedy_alone[text][0] for text in TEXTS]
    texts = [spaced.decode(g.output_ids) for g in outputs]
    # One of them wrong: another order would make all of them so.
    references = [*texts[:-1], "another text altogether"]
    pairs = list(zip(TEXTS, references, strict=True))
    assert sorted(pairs, key=lambda pair: len(pair[0])) != pairs
    seen = []
    evaluation = evaluate(
        generator,
        TextPairs(pairs=[SKIPPED[0], *pairs, SKIPPED[1]]),
        options(batch_size=2),
        lambda done, total: seen.append((done, total)),
    )
    assert (evaluation.num_pairs, evaluation.num_skipped) == (5, 2)
    expected = sacrebleu.corpus_bleu(texts, [references]).score
    assert 0 < expected < 100
    assert evaluation.metrics["bleu"] == pytest.approx(expected)
    assert "tok:13a" in evaluation.bleu_signature
    assert evaluation.num_tokens == sum(len(g.output_ids) for g in outputs)
    assert seen == [(done, 5) for done in range(1, 6)]


def test_evaluation_pools_acceptance_over_all_sequences(generator, greedy_alone):
    outputs, batched = [greedy_alone[text][0] for text in TEXTS], options(batch_size=2)
    pairs = [(text, "x") for text in TEXTS]
    evaluation = evaluate(generator, TextPairs(pairs=pairs), batched)
    calls = sum(g.target_calls for g in outputs)
    efficiency = sum(len(g.output_ids) for g in outputs) / calls
    assert evaluation.target_calls == calls
    accepted, verified = (
        np.sum([getattr(g, f"{name}_by_position") for g in outputs], axis=0)
        for name in ("accepted", "verified")
    )
    np.testing.assert_allclose(evaluation.acceptance_by_position, accepted / verified, rtol=1e-6)
    # The mean over positions, not the mean of the sequences' means.
    mean = sum(g.alpha * sum(g.verified_by_position) for g in outputs) / verified.sum()
    assert evaluation.alpha == pytest.approx(mean, abs=1e-5)
    for name, value in (("alpha", mean), ("block_efficiency", efficiency)):
        low, high = evaluation.intervals[name]
        assert low < value < high
        assert getattr(evaluation, name) == pytest.approx(value, abs=1e-5)
    # One text says nothing of others.
    assert evaluate(generator, TextPairs(pairs=pairs[2:3]), batched).intervals == {}


def test_evaluation_needs_a_usable_pair_and_one_decode(generator):
    unusable, none = TextPairs(pairs=SKIPPED), TextPairs(pairs=[])
    assert "the text is empty" in message_of(evaluate, generator, unusable, options())
    assert "there are no sources" in message_of(evaluate, generator, none, options())
    of_task = TextPairs(pairs=[("Die Katze", "the cat")], ids=[[5, 6, 7, 8, 1]])
    message = message_of(evaluate, generator, of_task, options(max_source_len=2))
    assert "the encoder takes 2 ('[5, 6, 7, 8, 1]'" in message
    pairs = TextPairs(pairs=[("Die Katze", "the cat")])
    message = message_of(evaluate, generator, pairs, options(beams=2))
    assert "beams is 2" in message
    sampled = options(num_decodes=2, temperature=1.0)
    message = message_of(evaluate, generator, pairs, sampled)
    assert "num_decodes is 2" in message
