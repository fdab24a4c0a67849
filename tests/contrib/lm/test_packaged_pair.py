"""The packaged pair for unconditional text."""

from spec_t5x.generation import Generator
from tests.end_to_end.test_packaged_pairs import OPTIONS, check_same_text_in_fewer_calls


def test_same_text_in_fewer_calls():
    generator = Generator.load("lm-target", "lm-draft")
    texts = ["the file", "he was not", "this is", ""]
    plain = [outputs[0] for outputs in generator.plain().generate(texts, OPTIONS)]
    check_same_text_in_fewer_calls(generator, texts, plain)
