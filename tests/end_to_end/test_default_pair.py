"""The packaged English-German pair, on real sentences that it was not trained on."""

import pytest

from spec_t5x.checkpoints.loading import PACKAGED_MODELS
from spec_t5x.data.tsv import read_pairs
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark.evaluation import evaluate

BATCH_32 = GenerateOptions(gamma=4, batch_size=32)


@pytest.fixture(scope="module")
def generator():
    return Generator.load("ende-target", "ende-draft")


@pytest.fixture(scope="module")
def dev_pairs(shared_data, generator):
    pairs = list(read_pairs(shared_data / "ende" / "dev.tsv.gz", 1, 2, 3))[:200]
    limit = generator.max_source_len
    return [pair for pair in pairs if len(generator.vocabulary.encode(pair[0])) < limit]


@pytest.fixture(scope="module")
def evaluation(generator, dev_pairs):
    """Decodes the first pairs of the dev set speculatively; the card has figures of all."""
    return evaluate(generator, dev_pairs, BATCH_32)


def test_dev_bleu_is_what_the_card_says(evaluation):
    card = (PACKAGED_MODELS / "ende-target" / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in card.splitlines() if line.startswith("| first 200 of dev")]
    assert f"| {evaluation.num_pairs} (2 left out" in row
    assert f"BLEU: `{evaluation.bleu_signature}`" in card
    # Another processor may break a near-tie otherwise in a sentence or two.
    bleu = float(row.partition("BLEU ")[2].partition(" ")[0])
    assert evaluation.metrics["bleu"] == pytest.approx(bleu, abs=0.15)


def test_more_than_two_tokens_for_each_target_call(evaluation):
    assert evaluation.block_efficiency == pytest.approx(2.591, abs=0.02)
    assert evaluation.alpha == pytest.approx(0.727, abs=0.01)


def test_same_text_as_plain_decoding(generator, dev_pairs):
    lengths = {source: len(generator.vocabulary.encode(source)) + 1 for source, _ in dev_pairs}
    texts = [source for source, length in lengths.items() if 16 < length <= 32][:10]
    options = GenerateOptions(gamma=4)
    plain = [outputs[0].output_ids for outputs in generator.plain().generate(texts, options)]
    ours = [outputs[0].output_ids for outputs in generator.generate(texts, options)]
    assert ours == plain
    assert len(plain) == 10
