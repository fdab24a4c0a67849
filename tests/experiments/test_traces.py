"""Traces: exact spans for a decode made by hand."""

import dataclasses
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from spec_t5x.cli.trace import print_trace
from spec_t5x.experiments import traces
from spec_t5x.experiments.traces import Trace, TraceLine
from spec_t5x.loops.speculative import Iteration
from spec_t5x.types import EOS_ID

WORDS = ["<pad>", "</s>", "<unk>", "the", "cat", "<dog>", "sat", "&", "down"]


def iteration(proposed, num_proposed, num_accepted, appended, num_appended):
    return Iteration(
        proposed=np.array([proposed], np.int32),
        num_proposed=np.array([num_proposed], np.int32),
        num_accepted=np.array([num_accepted], np.int32),
        appended=np.array([appended], np.int32),
        num_appended=np.array([num_appended], np.int32),
        ended=np.array([False]),
    )


@pytest.fixture
def trace() -> Trace:
    """One accepted and one rejected; all accepted; none proposed; an end inside the drafts."""
    iterations = [
        iteration([3, 5], 2, 1, [3, 4, 4], 2),
        iteration([6, 7], 2, 2, [6, 7, 8], 3),
        iteration([5, 5], 0, 0, [9, 9, 9], 1),
        iteration([EOS_ID, 3], 2, 1, [EOS_ID, 3, 3], 1),
    ]
    generator = SimpleNamespace(
        vocabulary=SimpleNamespace(piece=WORDS.__getitem__, vocab_size=len(WORDS)),
        steps=lambda *_: iter(iterations),
    )
    return traces.record(generator, "x", None)


def test_record_tells_what_became_of_each_token(trace):
    assert trace.lines == (
        TraceLine(before=[], accepted=["the"], rejected="<dog>", corrected="cat"),
        TraceLine(before=["the", "cat"], accepted=["sat", "&"], rejected=None, corrected="down"),
        TraceLine(
            before=["the", "cat", "sat", "&", "down"], accepted=[], rejected=None, corrected="<9>"
        ),
        TraceLine(
            before=["the", "cat", "sat", "&", "down", "<9>"],
            accepted=["[END]"],
            rejected=None,
            corrected=None,
        ),
    )
    assert trace.counts == "7 tokens with 4 target calls"
    lines = dataclasses.asdict(trace)["lines"]
    assert Trace.from_json(json.loads(json.dumps(lines))) == trace


def test_styled_lines_have_these_spans(trace):
    def spans(line):
        text = traces.styled(line)
        return text.plain, [(text.plain[s.start : s.end], s.style) for s in text.spans]

    assert [spans(line) for line in trace.lines] == [
        (" the <dog> cat", [(" the", "green"), (" <dog>", "red strike"), (" cat", "blue")]),
        (" the cat sat & down", [(" sat &", "green"), (" down", "blue")]),
        (" the cat sat & down <9>", [(" <9>", "blue")]),
        (" the cat sat & down <9> [END]", [(" [END]", "green")]),
    ]


def test_a_terminal_gets_a_legend(trace, monkeypatch):
    monkeypatch.setattr(traces, "iterations", lambda *_: iter(trace.lines))
    buffer = io.StringIO()
    print_trace(None, "x", None, Console(force_terminal=True, file=buffer))
    *lines, legend = map(Text.from_ansi, buffer.getvalue().splitlines())
    assert [line.plain for line in lines] == [traces.styled(line).plain for line in trace.lines]
    assert legend.plain.startswith("7 tokens with 4 target calls: ")
    assert len(legend.spans) == 3


def test_plain_text_marks_what_colours_would(trace):
    assert traces.plain_text(trace).splitlines() == [
        "  1  the [-<dog>-] {+cat+}",
        "  2  the cat sat & {+down+}",
        "  3  the cat sat & down {+<9>+}",
        "  4  the cat sat & down <9> [END]",
        "7 tokens with 4 target calls: accepted, [-rejected-], {+the target's own+}",
    ]
