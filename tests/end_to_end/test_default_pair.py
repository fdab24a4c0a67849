"""The packaged T5 and its draft, on real English-German pairs that they were not trained on."""

import pytest

from spec_t5x.checkpoints.loading import PACKAGED_MODELS
from spec_t5x.data.task_options import TRANSLATE_PREFIX
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark.evaluation import evaluate
from spec_t5x.labs.metrics import TextPairs
from spec_t5x.labs.text_pairs import read_pairs

BATCH_32 = GenerateOptions(gamma=4, batch_size=32)


@pytest.fixture(scope="module")
def evaluation(shared_data):
    """Translates the first pairs of the dev set speculatively; the card has figures of all."""
    generator = Generator.load("t5-target", "t5-draft")
    pairs = list(read_pairs(shared_data / "ende" / "dev.tsv.gz", 1, 2, 3))[:200]
    prefixed = [(TRANSLATE_PREFIX + source, target) for source, target in pairs]
    return evaluate(generator, TextPairs(pairs=prefixed), BATCH_32)


def test_dev_bleu_by_the_cards_signature(evaluation):
    card = (PACKAGED_MODELS / "t5-target" / "README.md").read_text(encoding="utf-8")
    assert f"BLEU: `{evaluation.bleu_signature}`" in card
    assert (evaluation.num_pairs, evaluation.num_skipped) == (199, 1)
    # Another processor may break a near-tie otherwise in a sentence or two.
    assert evaluation.metrics["bleu"] == pytest.approx(41.19, abs=0.15)


def test_more_than_two_tokens_for_each_target_call(evaluation):
    assert evaluation.block_efficiency == pytest.approx(2.281, abs=0.02)
    assert evaluation.alpha == pytest.approx(0.662, abs=0.01)
