"""Results of commands, and their refusals."""

from typing import NamedTuple


class Result(NamedTuple):
    """Exit status, lines of standard output, lines of standard error."""

    status: int
    lines: list[str]
    errors: list[str]


def assert_refused(result: Result, *expected: str):
    """Checks for status 2, nothing on standard output, and one line that holds the values."""
    assert result.status == 2
    assert result.lines == []
    (line,) = result.errors
    assert line.startswith("spec-t5x: error: ")
    for value in expected:
        assert value in line
