"""Progress of a run on a terminal and elsewhere."""

import io
import logging
import re
import sys
import time
import types

import pytest

from spec_t5x.inference.answering import Tally
from spec_t5x.inference.decoding_progress import DecodingProgress
from spec_t5x.machine import progress
from spec_t5x.machine.progress import Progress
from tests.child import HANGS


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def logged(caplog):
    """Provides the log of a program that shows information."""
    caplog.set_level("INFO", logger="spec_t5x")
    return caplog


def test_elsewhere_than_on_a_terminal_it_is_lines_now_and_then(logged):
    with Progress("steps", io.StringIO(), every=0) as bar:
        bar.update(5, 1000, "loss 2")
        bar.update(6, None, "loss 1")
        bar.say("[100 % done]")
    assert logged.messages == ["5 of 1,000 steps, loss 2", "6 steps, loss 1", "[100 % done]"]


def test_the_first_line_comes_after_a_moment_the_next_one_later(logged, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress, "A_MOMENT", 1.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    with Progress("steps", io.StringIO(), every=30) as bar:
        for step, seconds in enumerate((0.9, 1.0, 30.9, 31.0)):
            now[0] = 100.0 + seconds
            bar.update(step, 4, "loss 2")
    assert logged.messages == ["1 of 4 steps, loss 2", "3 of 4 steps, loss 2"]


def test_where_nothing_is_to_be_logged_nothing_is_shown(logged, capfd):
    logged.set_level("WARNING", logger="spec_t5x")
    for stream in (io.StringIO(), Terminal()):
        with Progress("steps", stream, every=0) as bar:
            bar.update(5, 10, "loss 2")
            bar.say("done")
        assert stream.getvalue() == ""
    assert logged.messages == [] and capfd.readouterr() == ("", "")


def test_a_bar_leaves_standard_output_to_its_file(monkeypatch):
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    with Progress("inputs", terminal) as bar:
        bar.update(1, 2, "decoding")
        print("an answer")
    assert file.getvalue() == "an answer\n" and "an answer" not in terminal.getvalue()


@pytest.mark.parametrize(("moment", "said"), [(0.0, ["reading"]), (60.0, [])])
def test_what_takes_more_than_a_moment_is_said_and_how_long_all_took(
    logged, monkeypatch, moment, said
):
    monkeypatch.setattr(progress, "A_MOMENT", moment)
    log = logging.getLogger("spec_t5x.test")
    with progress.doing(log, "reading"):
        deadline = time.monotonic() + HANGS
        while len(logged.messages) < len(said) and time.monotonic() < deadline:
            time.sleep(0.001)
    assert logged.messages == said
    logged.set_level("DEBUG", logger="spec_t5x")
    # No timer announces "counting" beside its debug line.
    monkeypatch.setattr(progress, "A_MOMENT", 60.0)
    with progress.doing(log, "counting"):
        pass
    assert re.fullmatch(r"counting: \d+\.\d\d s", logged.messages[-1])


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["lines", "terminal"])
def test_what_is_decoded_is_counted(stream, logged):
    with DecodingProgress(stream) as bar:
        bar.reading(3)
        bar.decoding(10, finished=7)
        for _ in range(2):
            bar.count(Tally(inputs=5, tokens=40, target_calls=16, advance=40.0))
    assert bar.tally == Tally(inputs=10, tokens=80, target_calls=32, advance=80.0)
    shown = stream.getvalue() + logged.text
    assert "resuming: 7 answered, 10 left" in shown
    if stream.isatty():
        assert "10/10" in shown and "block efficiency 2.50" in shown
