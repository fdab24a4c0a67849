"""What a run shows on a terminal and elsewhere."""

import io

import pytest

from spec_t5x.inference.answering import Tally
from spec_t5x.inference.decoding_progress import DecodingProgress
from spec_t5x.machine.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_elsewhere_than_on_a_terminal_it_is_lines_now_and_then():
    stream = io.StringIO()
    with Progress("steps", stream, every=0) as progress:
        progress.update(5, 1000, "loss 2")
        progress.update(6, None, "loss 1")
        progress.say("[done]")
    assert stream.getvalue().splitlines() == [
        "spec-t5x: 5 of 1,000 steps, loss 2",
        "spec-t5x: 6 steps, loss 1",
        "spec-t5x: [done]",
    ]
    with Progress("steps", stream := io.StringIO()) as progress:
        progress.update(5, 10, "loss 2")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["lines", "terminal"])
def test_what_is_decoded_is_counted(stream):
    with DecodingProgress(stream) as progress:
        progress.reading(3)
        progress.decoding(10, finished=7)
        for _ in range(2):
            progress.count(Tally(inputs=5, tokens=40, target_calls=16, advance=40.0))
    assert progress.tally == Tally(inputs=10, tokens=80, target_calls=32, advance=80.0)
    shown = stream.getvalue()
    assert "resuming: 7 inputs have answers, 10 are left" in shown
    if stream.isatty():
        assert "10/10" in shown and "block efficiency 2.50" in shown
