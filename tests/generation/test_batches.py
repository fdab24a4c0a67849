"""Batches of texts: their rows, padding and prompts."""

import numpy as np
import pytest

from spec_t5x.generation import Generator
from spec_t5x.labs.benchmark.text_batches import text_batches
from spec_t5x.types import EOS_ID, PAD_ID
from tests.generation.cases import GREEDY, TEXTS, options

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def test_batches_hold_the_inputs_in_order_and_padding_rows_that_end_at_once(generator):
    batches = text_batches(generator, TEXTS, options(batch_size=2))
    assert [batch.texts for batch in batches] == [TEXTS[:2], TEXTS[2:4], TEXTS[4:]]
    for batch in batches:
        assert batch.tokens.shape == (2, 16)
        for row, text in enumerate(batch.texts):
            ids = generator.tokenize(text, GREEDY)
            np.testing.assert_array_equal(batch.tokens[row], np.pad(ids, (0, 16 - len(ids))))
    assert [batch.max_decode_steps.tolist() for batch in batches] == [[16, 16], [16, 16], [16, 0]]
    # Something to attend to, or the softmax would average over padding.
    assert batches[-1].tokens[1].tolist() == [EOS_ID] + [PAD_ID] * 15


def test_prefixes_share_a_program_and_padding_changes_no_text(generator, monkeypatch):
    prefixes, search = ("a", "Der alte T"), {"gamma": 0, "beams": 2}

    def decoded():
        return [
            [(one.output, one.output_ids, one.target_calls) for one in answer]
            for prefix in prefixes
            for changes in ({}, {"batch_size": 2}, {"temperature": 1.0, "seed": 4}, search)
            for answer in generator.generate(TEXTS[:3], GREEDY, output_prefix=prefix, **changes)
        ]

    def widths(**limits):
        given = (options(output_prefix=prefix, **limits) for prefix in prefixes)
        batches = (text_batches(generator, TEXTS[:1], one) for one in given)
        return [batch.prompts.shape for (batch,) in batches]

    shared = decoded()
    for prefix in prefixes:
        ((plain,),) = generator.generate(TEXTS[:1], GREEDY, gamma=0, output_prefix=prefix)
        given = len(generator.vocabulary.encode(prefix))
        assert plain.target_calls == len(plain.output_ids) - given
    # The limit of sources is none of prefixes.
    assert widths() == widths(max_source_len=8, truncate=True) == [(1, 17), (1, 17)]
    # Without padding.
    monkeypatch.setattr(Generator, "_longest_prompt", lambda self, options: 0)
    ids = map(generator.vocabulary.encode, prefixes)
    assert widths() == [(1, 1 + len(each)) for each in ids] and decoded() == shared
