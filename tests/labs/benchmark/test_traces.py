"""Traces: exact spans for a decode made by hand."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from spec_t5x.generation import StreamEvent
from spec_t5x.labs.benchmark import traces
from spec_t5x.labs.benchmark.console import print_trace
from spec_t5x.labs.benchmark.traces import TraceLine
from spec_t5x.types import EOS_ID

WORDS = ["<pad>", "</s>", "<unk>", "the", "cat", "<dog>", "sat", "&", "down"]


def event(proposed, num_accepted, own):
    values = {"text": "", "target_calls": 0, "seconds": 0.0, "prefill_seconds": 0.0}
    return StreamEvent(proposed=proposed, num_accepted=num_accepted, own=own, **values)


@pytest.fixture
def lines() -> list[TraceLine]:
    """Provides one accepted and one rejected; all accepted; none proposed; an end in the drafts."""
    events = [
        event([3, 5], 1, 4),
        event([6, 7], 2, 8),
        event([], 0, 9),
        event([EOS_ID, 3], 1, None),
    ]
    generator = SimpleNamespace(
        vocabulary=SimpleNamespace(piece=WORDS.__getitem__, vocab_size=len(WORDS)),
        stream=lambda *_, place: iter(events),
    )
    return list(traces.iterations(generator, "x", None))


def test_lines_tell_what_became_of_each_token(lines):
    text = ["the", "cat", "sat", "&", "down", "<9>"]
    assert [(line.before, line.accepted, line.rejected, line.corrected) for line in lines] == [
        ([], ["the"], "<dog>", "cat"),
        (text[:2], ["sat", "&"], None, "down"),
        (text[:5], [], None, "<9>"),
        (text, ["[END]"], None, None),
    ]


def test_styled_lines_have_these_spans(lines):
    def spans(line):
        text = traces.styled(line)
        return text.plain, [(text.plain[s.start : s.end], s.style) for s in text.spans]

    assert [spans(line) for line in lines] == [
        (" the <dog> cat", [(" the", "green"), (" <dog>", "red strike"), (" cat", "blue")]),
        (" the cat sat & down", [(" sat", "green"), (" &", "green"), (" down", "blue")]),
        (" the cat sat & down <9>", [(" <9>", "blue")]),
        (" … cat sat & down <9> [END]", [(" [END]", "green")]),
    ]


def test_without_colours_lines_have_marks(lines, monkeypatch):
    monkeypatch.setattr(traces, "iterations", lambda *_: iter(lines))
    print_trace(None, "x", None, Console(file=(buffer := io.StringIO()), width=10))
    assert buffer.getvalue().splitlines() == [
        " the [-<dog>-] {+cat+}",
        " the cat sat & {+down+}",
        " the cat sat & down {+<9>+}",
        " the cat sat & down <9> [END]",
        "7 tokens with 4 target calls: accepted, [-rejected-], {+the target's own+}",
    ]


def test_a_terminal_gets_a_legend(lines, monkeypatch):
    monkeypatch.setattr(traces, "iterations", lambda *_: iter(lines))
    print_trace(None, "x", None, Console(force_terminal=True, file=(buffer := io.StringIO())))
    *shown, legend = map(Text.from_ansi, buffer.getvalue().splitlines())
    assert [line.plain for line in shown] == [traces.styled(line).plain for line in lines]
    assert legend.plain.startswith("7 tokens with 4 target calls: ")
    assert len(legend.spans) == 3
