"""Traces: exact spans for a decode made by hand, and files that need nothing else."""

import re
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest

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
        TraceLine(before=(), accepted=("the",), rejected="<dog>", corrected="cat"),
        TraceLine(before=("the", "cat"), accepted=("sat", "&"), rejected=None, corrected="down"),
        TraceLine(
            before=("the", "cat", "sat", "&", "down"), accepted=(), rejected=None, corrected="<9>"
        ),
        TraceLine(
            before=("the", "cat", "sat", "&", "down", "<9>"),
            accepted=("[END]",),
            rejected=None,
            corrected=None,
        ),
    )
    assert (trace.num_tokens, trace.target_calls) == (7, 4)
    assert Trace.from_json(trace.to_json()) == trace


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


def test_plain_text_marks_what_colours_would(trace):
    assert traces.plain_text(trace).splitlines() == [
        "  1  the [-<dog>-] {+cat+}",
        "  2  the cat sat & {+down+}",
        "  3  the cat sat & down {+<9>+}",
        "  4  the cat sat & down <9> [END]",
        "7 tokens with 4 target calls: accepted, [-rejected-], {+the target's own+}",
    ]


def test_svg_is_well_formed_complete_and_needs_no_network(trace):
    text = traces.svg(trace)
    root = ElementTree.fromstring(text)
    assert root.get("viewBox")
    shown = "".join(root.itertext()).replace("\xa0", " ")
    for piece in ("the", "<dog>", "&", "[END]", "7 tokens with 4 target calls"):
        assert piece in shown
    # Namespaces are names; nothing is fetched.
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@font-face" not in text and "@import" not in text
    assert "line-through" in text


def test_html_is_one_page_that_needs_no_network(trace):
    text = traces.html(trace)
    assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")
    assert "http" not in text and "<link" not in text and "<script" not in text
    # Escaped, in the colour of what was rejected.
    (name,) = re.findall(r'<span class="(r\d+)"> &lt;dog&gt;</span>', text)
    (style,) = re.findall(rf"\.{name} {{(.*)}}", text)
    assert "line-through" in style


def test_long_lines_go_on_under_their_own_beginning(trace):
    narrow = traces.svg(trace, width=20)
    wide = traces.svg(trace, width=110)
    height = [float(ElementTree.fromstring(t).get("viewBox").split()[3]) for t in (narrow, wide)]
    assert height[0] > height[1]
