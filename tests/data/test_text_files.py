"""Lines of a stream, in groups as they arrive."""

import itertools

import pytest

from spec_t5x.data.text_files import arriving


def test_a_flood_of_lines_is_answered_in_parts():
    first = next(arriving(itertools.repeat(b"a line\n")))
    assert 0 < len(first) <= 4096


def test_an_error_of_the_input_comes_after_its_lines():
    def lines():
        yield b"a line\n"
        raise OSError("the pipe is gone")

    coming = arriving(lines())
    assert next(coming) == [b"a line\n"]
    with pytest.raises(OSError, match="the pipe is gone"):
        next(coming)
