"""A bar on a terminal, lines elsewhere."""

import io

import pytest

from spec_t5x.experiments.reproduction.items import Part
from spec_t5x.experiments.reproduction.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def part(name, seconds):
    return Part(name=name, inputs={}, seconds=seconds, compute=lambda report: None)


def work(progress):
    first, second = part("first", 30.0), part("second", 10.0)
    with progress:
        progress.begin(1, 2, first)
        progress.advance(0.5)
        progress.end(first, None)
        progress.begin(2, 2, second)
        progress.end(second, "no [luck]")


def test_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    work(Progress(40.0, stream))
    assert stream.getvalue().splitlines() == [
        "spec-t5x: [1/2] first, about 30 s",
        "spec-t5x: [2/2] second, about 10 s",
        "spec-t5x: not computed: second: no [luck]",
    ]


def test_a_bar_of_the_estimated_time_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    progress = Progress(40.0, stream)
    done = []
    with progress:
        first = part("first", 30.0)
        progress.begin(1, 2, first)
        for fraction in (0.5, 2.0):
            progress.advance(fraction)
            done.append(progress._bar.tasks[0].completed)
        progress.end(first, None)
        progress.begin(2, 2, part("second", 10.0))
        done.append(progress._bar.tasks[0].completed)
        progress.end(part("second", 10.0), "no [luck]")
        done.append(progress._bar.tasks[0].completed)
    # Of 40 seconds; a part is never more than done.
    assert done == pytest.approx([15, 30, 30, 40])
    assert "[2/2] second" in stream.getvalue()
    assert "not computed: second: no [luck]" in stream.getvalue()


def test_nothing_to_do_needs_no_bar():
    stream = Terminal()
    with Progress(0.0, stream) as progress:
        progress.say("nothing")
    assert stream.getvalue().strip() == "nothing"
