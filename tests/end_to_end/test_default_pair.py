"""The packaged English-German pair, on real sentences that it was not trained on."""

import dataclasses
import json

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
def card():
    """The figures that the packaged models claim."""
    figures = json.loads((PACKAGED_MODELS / "ende-target" / "figures.json").read_text())
    return figures["first_200_of_dev_ende-draft_0"]


@pytest.fixture(scope="module")
def dev_pairs(shared_data, generator):
    pairs = list(read_pairs(shared_data / "ende" / "dev.tsv.gz", 1, 2, 3))[:200]
    limit = generator.max_source_len
    return [pair for pair in pairs if len(generator.vocabulary.encode(pair[0])) < limit]


@pytest.fixture(scope="module")
def evaluation(generator, dev_pairs):
    """The first pairs of the dev set, decoded speculatively; the card has figures of all."""
    return evaluate(generator, dev_pairs, BATCH_32)


def test_dev_bleu_is_what_the_card_says(evaluation, card):
    assert evaluation.num_pairs == card["num_pairs"]
    assert evaluation.bleu_signature == card["bleu_signature"]
    # Another processor may break a near-tie otherwise in a sentence or two.
    assert evaluation.metrics["bleu"] == pytest.approx(card["bleu"], abs=0.1)


def test_more_than_two_tokens_for_each_target_call(evaluation, card):
    assert evaluation.block_efficiency > 2
    assert evaluation.block_efficiency == pytest.approx(card["block_efficiency"], abs=0.02)
    assert evaluation.alpha == pytest.approx(card["alpha"], abs=0.01)


@pytest.fixture(scope="module")
def texts(generator, dev_pairs):
    """Sources that are padded to one length: each program is compiled once."""
    lengths = {source: len(generator.vocabulary.encode(source)) + 1 for source, _ in dev_pairs}
    return [source for source, length in lengths.items() if 16 < length <= 32]


@pytest.mark.parametrize(("batch_size", "gamma", "count"), [(1, 4, 30), (5, 7, 20), (32, 4, 33)])
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
