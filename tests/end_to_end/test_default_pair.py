"""The packaged English-German pair, on real sentences that it was not trained on."""

import dataclasses

import pytest

from spec_t5x.checkpoints.loading import PACKAGED_MODELS
from spec_t5x.data.tsv import read_pairs
from spec_t5x.experiments.evaluation import evaluate
from spec_t5x.generation import GenerateOptions, Generator

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
    """The first pairs of the dev set, decoded speculatively; the card has figures of all."""
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


@pytest.fixture(scope="module")
def texts(generator, dev_pairs):
    """Sources that are padded to one length: each program is compiled once."""
    lengths = {source: len(generator.vocabulary.encode(source)) + 1 for source, _ in dev_pairs}
    return [source for source, length in lengths.items() if 16 < length <= 32]


@pytest.mark.parametrize(("batch_size", "gamma", "count"), [(1, 4, 10), (5, 7, 12)])
def test_same_text_as_plain_decoding(generator, texts, batch_size, gamma, count):
    options = dataclasses.replace(BATCH_32, batch_size=batch_size, gamma=gamma)
    texts = texts[:count]
    plain = [outputs[0].output_ids for outputs in generator.plain().generate(texts, options)]
    ours = [outputs[0].output_ids for outputs in generator.generate(texts, options)]
    assert ours == plain
    assert len(plain) == count


def test_target_as_its_own_draft_is_always_accepted(generator, texts):
    itself = dataclasses.replace(
        generator, draft=dataclasses.replace(generator.draft, model=generator.target)
    )
    for (output,) in itself.generate(texts[:8], GenerateOptions(gamma=3)):
        # 4 tokens in every call but the last.
        assert output.target_calls == -(-len(output.output_ids) // 4)
