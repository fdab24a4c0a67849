"""The packaged T5 and its drafts: each of its three tasks, with the text of plain decoding."""

import pytest

from spec_t5x.data.task_options import SUMMARIZE_PREFIX, TRANSLATE_PREFIX
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.reproduction.example_texts import DESCRIPTIONS, SENTENCES

# One number of texts and of their tokens: the target's programs are compiled once for all drafts.
OPTIONS = GenerateOptions(gamma=4, batch_size=4, max_decode_len=32, truncate=True)
WRONG = (
    "He dont know.",
    "I has recieved you're leter yesterday.",
    "She go to school every days.",
    "This package contain the documentation.",
)
TEXTS = {
    "translate": [TRANSLATE_PREFIX + text for text in SENTENCES[:4]],
    "correct": [f"correct: {text}" for text in WRONG],
    "summarize": [SUMMARIZE_PREFIX + text for text in DESCRIPTIONS[:4]],
}


@pytest.fixture(scope="module")
def plain():
    """Provides ``plain(task)``: the target's outputs, decoded once."""
    generator, found = Generator.load("t5-target", "none"), {}

    def outputs(task):
        if task not in found:
            found[task] = [outputs[0] for outputs in generator.generate(TEXTS[task], OPTIONS)]
        return found[task]

    return outputs


@pytest.mark.parametrize(
    ("draft", "task"),
    [*((draft, task) for draft in ("t5-draft", "t5-eagle") for task in TEXTS), ("copy", "correct")],
)
def test_same_text_in_fewer_calls(draft, task, plain):
    check_same_text_in_fewer_calls(Generator.load("t5-target", draft), TEXTS[task], plain(task))


def check_same_text_in_fewer_calls(generator, texts, plain):
    """Checks the generator's outputs for ``texts`` against those of plain decoding."""
    ours = [outputs[0] for outputs in generator.generate(texts, OPTIONS)]
    assert [o.output_ids for o in ours] == [o.output_ids for o in plain]
    calls = sum(o.target_calls for o in ours)
    assert sum(len(o.output_ids) for o in ours) > 1.2 * calls


def test_its_prefix_chooses_the_task():
    generator, wrong = Generator.load("t5-target", "none"), "The red cars is in front of the house."
    prefixes = (TRANSLATE_PREFIX, "correct: ", SUMMARIZE_PREFIX)
    translated, corrected, summarized = (
        outputs[0].output
        for outputs in generator.generate([prefix + wrong for prefix in prefixes], OPTIONS)
    )
    assert "Haus" in translated
    assert corrected == "The red cars are in front of the house."
    assert 0 < len(summarized) < len(wrong) / 2
