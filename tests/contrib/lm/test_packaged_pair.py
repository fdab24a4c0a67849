"""The packaged pair for unconditional text."""

import pytest

from spec_t5x.errors import InputError
from spec_t5x.generation import Generator
from tests.end_to_end.test_packaged_pairs import OPTIONS, check_same_text_in_fewer_calls


def test_same_text_in_fewer_calls():
    generator = Generator.load("lm-target", "lm-draft")
    texts = ["the file", "he was not", "this is", ""]
    plain = [outputs[0] for outputs in generator.plain().generate(texts, OPTIONS)]
    check_same_text_in_fewer_calls(generator, texts, plain)


def test_a_beginning_of_outputs_is_refused():
    generator = Generator.load("lm-target")
    with pytest.raises(InputError, match="^output_prefix is 'Once' and a decoder-only model's pro"):
        list(generator.generate("the", output_prefix="Once"))
    # An empty prompt leaves the first token to the option.
    refused, forced = generator.generate(["the", ""], forced_bos_token_id=9, max_decode_len=4)
    assert "forced_bos_token_id is 9 and the prompt comes first" in str(refused.error)
    assert forced[0].output_ids[0] == 9


def test_a_search_does_not_depend_on_the_prompts_beside_it():
    generator, options = Generator.load("lm-target"), {"beams": 4, "max_decode_len": 16}

    def found(texts, batch_size):
        answers = generator.generate(texts, batch_size=batch_size, **options)
        return [[(one.output, one.score, one.target_calls) for one in answer] for answer in answers]

    texts = ["the", "i have", "how do i", "if you"]
    alone = [found([text], 1)[0] for text in texts]
    beside = [found([text, "the " * 60], 2)[0] for text in texts]
    for (output, score, calls), (other, same_score, same_calls) in zip(
        sum(alone, []), sum(beside, []), strict=True
    ):
        assert (output, calls) == (other, same_calls)
        assert abs(score - same_score) < 1e-4
