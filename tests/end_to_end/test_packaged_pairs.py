"""The packaged pairs for summaries and for unconditional text."""

import pytest

from spec_t5x.experiments.reproduction.example_texts import DESCRIPTIONS
from spec_t5x.generation import GenerateOptions, Generator

# One shape for all texts of a pair: each program is compiled once.
TEXTS = {
    "summaries": list(DESCRIPTIONS[:4]),
    "lm": ["the file", "he was not", "this is", ""],
}


@pytest.mark.parametrize("name", TEXTS)
def test_same_text_in_fewer_calls(name):
    generator = Generator.load(f"{name}-target", f"{name}-draft")
    options = GenerateOptions(gamma=4, batch_size=4, max_decode_len=32, truncate=True)
    plain = [outputs[0] for outputs in generator.plain().generate(TEXTS[name], options)]
    ours = [outputs[0] for outputs in generator.generate(TEXTS[name], options)]
    assert [o.output_ids for o in ours] == [o.output_ids for o in plain]
    assert all(o.output.strip() for o in ours)
    calls = sum(o.target_calls for o in ours)
    assert sum(len(o.output_ids) for o in ours) > 1.2 * calls
