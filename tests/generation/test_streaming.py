"""Streams have the texts of ``generate``, call by call."""

import copy
import dataclasses
import types

import pytest

from spec_t5x.generation import streaming
from spec_t5x.loops import speculative
from tests.checkpoints.faults import message_of
from tests.generation.cases import GREEDY, SAMPLED, TEXTS, assert_same, options

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def events_of(generator, text, settings, place=0):
    """Checks that a stream gives what ``generate`` gives, and is consistent in itself."""
    # Each has its own pace.
    one, other = (generator.with_draft(generator.draft) for _ in range(2))
    events = list(one.stream(text, settings, place=place))
    (expected,) = other.generate(text, settings, first=place)
    ids = [token for event in events for token in event.appended]
    *before, last = events
    assert [event.generation for event in before] == [None] * len(before)
    assert_same([[last.generation]], [expected])
    assert ids == last.generation.output_ids
    assert last.text == last.generation.output
    assert [event.target_calls for event in events] == [*range(1, len(events) + 1)]
    assert last.target_calls == last.generation.target_calls
    seconds = [event.seconds for event in events]
    assert 0 < last.prefill_seconds < seconds[0] and seconds == sorted(seconds)
    assert all(last.text.startswith(event.text) for event in events)
    return events


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("gamma", [3, "auto"])
def test_a_stream_is_what_generate_gives(generator, settings, gamma):
    settings = dataclasses.replace(settings, gamma=gamma)
    for place, text in enumerate(TEXTS[:3]):
        events = events_of(generator, text, settings, place)
        generation = events[-1].generation
        assert sum(event.num_accepted for event in events) == generation.accepted
        assert sum(len(event.proposed) for event in events) == generation.proposed
        refused = [event for event in events if event.rejected]
        assert refused and generation.accepted
        for event in refused:
            assert event.accepted + event.rejected == event.proposed
            assert settings.temperature or event.own != event.rejected[0]


@pytest.mark.parametrize(
    ("temperature", "verifier"), [(0.0, "block"), (1.0, "coupled"), (1.0, "tree")]
)
def test_without_a_draft_tokens_come_one_by_one(generator, temperature, verifier):
    settings = options(temperature=temperature, seed=3, verifier=verifier)
    for place, text in enumerate(TEXTS[:2]):
        events = events_of(generator.plain(), text, settings, place)
        assert [len(event.appended) for event in events] == [1] * len(events)
        assert not any(event.proposed for event in events)


def test_streams_without_a_draft_share_a_program(generator):
    missed = []
    for verifier in ("block", "token", "tree"):
        settings = options(temperature=1.0, seed=3, verifier=verifier)
        list(events_of(generator.plain(), TEXTS[0], settings, 0))
        missed.append(speculative._compiled.cache_info().misses)
    assert missed[0] == missed[1] == missed[2]


def test_a_stream_holds_back_words_whose_spaces_may_go(generator, monkeypatch):
    vocabulary = copy.copy(generator.vocabulary)
    monkeypatch.setattr(vocabulary, "cleans_up", True)
    words = ["It", "is", "n't", "wet", ".", "We", "'re", ","] * 2
    decode = lambda ids: vocabulary.cleaned(" ".join(words[: len(ids)]))  # noqa: E731
    monkeypatch.setattr(vocabulary, "decode", decode)
    spaced = dataclasses.replace(generator, vocabulary=vocabulary)
    *before, last = spaced.plain().stream(TEXTS[0], GREEDY)
    assert last.text.startswith("It isn't wet. We're,") and len(before) > 8
    assert all(last.text.startswith(event.text) for event in before)


def test_a_streams_clock_leaves_out_the_callers_time(generator, monkeypatch):
    now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(streaming, "time", clock)
    for event in generator.stream(TEXTS[0], GREEDY):
        assert event.seconds == event.prefill_seconds == 0
        now[0] += 100


def test_a_stream_is_of_one_decode_that_is_no_search(generator):
    assert "num_decodes is 2" in message_of(generator.stream, "Die Katze", num_decodes=2)
    assert "a stream decodes one output" in message_of(generator.stream, TEXTS[0], options(beams=2))
    assert "the text is empty" in message_of(generator.stream, " ")
