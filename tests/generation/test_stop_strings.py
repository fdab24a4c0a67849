"""Stop strings end outputs, whole, in slots and call by call."""

import dataclasses

import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions
from spec_t5x.generation.stop_strings import Stopped, first_stop, settled
from spec_t5x.types import EOS_ID
from tests.generation.cases import GREEDY, TEXTS

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

BYTES = ByteVocabulary()


class ReplacingVocabulary(ByteVocabulary):
    """A vocabulary that shows unfinished characters as SentencePiece's byte fallback does."""

    def decode(self, ids):
        return bytes(i - 3 for i in ids if i != EOS_ID).decode("utf-8", errors="replace")


def test_a_stop_string_in_the_prefix_ends_nothing(generator):
    plain, given = generator.plain(), dataclasses.replace(GREEDY, gamma=0, output_prefix="a. b")
    ((whole,),) = plain.generate(TEXTS[0], given)
    stopping = dataclasses.replace(given, stop=(". ",))
    ((found,),) = plain.generate(TEXTS[0], stopping)
    *_, last = plain.stream(TEXTS[0], stopping)
    assert found.output == last.text == whole.output and whole.output.startswith("a. b")
    # One after it ends the output, whose ids include the prefix's.
    stop, decode = whole.output[-2:], generator.vocabulary.decode
    ((cut,),) = plain.generate(TEXTS[0], given, stop=stop)
    assert cut.output == whole.output.partition(stop)[0]
    assert stop in decode(cut.output_ids) and stop not in decode(cut.output_ids[:-1])


def test_a_stop_string_may_begin_in_the_prefix():
    decode, ids = BYTES.decode, BYTES.encode("a. b. c. d")
    for given, kept in ((0, "a"), (3, "a. b"), (2, "a"), (6, "a. b. c")):
        stopped = first_stop(decode, ids[:given], ids[given:], (". ",), given)
        assert stopped.text == kept


# --- where a text ends ---------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((), None),
        (("xyz",), None),
        (("cd",), Stopped(4, "ab")),
        # At the start.
        (("a",), Stopped(1, "")),
        # The string that is complete first, not the one that begins first.
        (("bcdefg", "de"), Stopped(5, "abc")),
        (("abcde", "de"), Stopped(5, "")),
        (("de", "abcde"), Stopped(5, "")),
    ],
)
def test_the_first_stop_string_that_is_complete_ends_the_text(stop, expected):
    ids = BYTES.encode("abcdefgh")
    assert first_stop(BYTES.decode, [], ids, stop) == expected
    # With the first tokens known, which may hold a part of the string.
    for known in range(expected.count if expected else len(ids)):
        found = first_stop(BYTES.decode, ids[:known], ids[known:], stop)
        assert found == (expected and Stopped(expected.count - known, expected.text))


@pytest.mark.parametrize("vocabulary", [BYTES, ReplacingVocabulary()])
def test_what_may_still_change_is_held_back(vocabulary):
    text, stop = "für 漢字 – ok END.", ["END!", "ND?"]
    ids = [*vocabulary.encode(text), EOS_ID]
    shown = [settled(vocabulary.decode(ids[:n]), stop) for n in range(len(ids) + 1)]
    assert all(text.startswith(part) for part in shown)
    assert shown == sorted(shown, key=len)
    assert shown[0] == "" and shown[-1] == text
    assert shown[-3] == "für 漢字 – ok "


# --- outputs -------------------------------------------------------------------


def test_outputs_are_those_without_it_up_to_it(generator):
    """Greedy and sampled outputs are cut, in a batch and in slots."""
    for temperature in (0.0, 1.0):
        whole = dataclasses.replace(GREEDY, temperature=temperature, seed=3)
        (expected, *others) = (answer[0] for answer in generator.generate(TEXTS, whole))
        # A stop string of two pieces.
        stop = expected.output[3:7]
        assert len(generator.vocabulary.encode(stop)) > 1
        cut = dataclasses.replace(whole, stop=(stop, "not there"))
        found, *uncut = (answer[0] for answer in generator.generate(TEXTS, cut))
        assert found.output == expected.output.partition(stop)[0] != expected.output
        assert found.output_ids == expected.output_ids[: len(found.output_ids)]
        assert stop in generator.vocabulary.decode(found.output_ids)
        assert stop not in generator.vocabulary.decode(found.output_ids[:-1])
        # Statistics include the tokens beyond.
        same = {name: getattr(found, name) for name in ("output", "output_ids")}
        assert dataclasses.replace(expected, **same) == found
        for one, other in zip(uncut, others, strict=True):
            assert one == other or stop in other.output
        slots = generator.generate(TEXTS, cut, batch_size=2)
        assert [answer[0].output_ids for answer in slots] == [
            one.output_ids for one in (found, *uncut)
        ]


@pytest.mark.parametrize("drafts", [True, False])
def test_a_stream_stops_decoding(generator, drafts):
    generator = generator if drafts else generator.plain()
    ((whole,),) = generator.generate(TEXTS[0], GREEDY)
    stop = whole.output[3:7]
    *before, last = generator.stream(TEXTS[0], GREEDY, stop=stop)
    ((expected,),) = generator.generate(TEXTS[0], GREEDY, stop=stop)
    assert (last.text, last.generation.output) == (expected.output, expected.output)
    assert last.generation.output_ids == expected.output_ids
    ids = [token for event in (*before, last) for token in event.appended]
    assert ids == expected.output_ids
    assert last.target_calls == last.generation.target_calls < whole.target_calls
    # Shown text is never withdrawn.
    assert all(last.text.startswith(event.text) for event in before)
    ((empty,),) = generator.generate(TEXTS[0], GREEDY, stop=whole.output[:2])
    assert empty.output == "" and whole.output[:2] in generator.vocabulary.decode(empty.output_ids)


@pytest.mark.parametrize(("stop", "expected"), [(("a", ""), "stop is ''"), ((3,), "stop is 3")])
def test_what_cannot_stop_an_output_is_refused(stop, expected):
    with pytest.raises(InputError) as caught:
        GenerateOptions(stop=stop)
    assert expected in str(caught.value)
