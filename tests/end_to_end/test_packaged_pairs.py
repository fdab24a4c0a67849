"""The packaged pair for summaries, and the packaged EAGLE heads."""

import pytest

from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.reproduction.example_texts import DESCRIPTIONS

SENTENCES = ["Where is the station?", "This package contains the documentation.", "I am tired."]
# One shape for all texts of a pair: each program is compiled once.
TEXTS = {
    ("summaries-target", "summaries-draft"): list(DESCRIPTIONS[:4]),
    ("summaries-target", "summaries-eagle"): list(DESCRIPTIONS[:4]),
    ("ende-target", "ende-eagle"): [*SENTENCES, "Good morning."],
    ("correct-target", "copy"): ["He dont know.", *(f"{text[:-2]}." for text in SENTENCES)],
}


@pytest.mark.parametrize(("target", "draft"), TEXTS)
def test_same_text_in_fewer_calls(target, draft):
    generator, texts = Generator.load(target, draft), TEXTS[target, draft]
    options = GenerateOptions(gamma=4, batch_size=4, max_decode_len=32, truncate=True)
    plain = [outputs[0] for outputs in generator.plain().generate(texts, options)]
    ours = [outputs[0] for outputs in generator.generate(texts, options)]
    assert [o.output_ids for o in ours] == [o.output_ids for o in plain]
    assert all(o.output.strip() for o in ours)
    calls = sum(o.target_calls for o in ours)
    assert sum(len(o.output_ids) for o in ours) > 1.2 * calls
