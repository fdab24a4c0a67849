"""Results of commands, and a check of refused arguments."""

from typing import NamedTuple


class Result(NamedTuple):
    """Result of a command: exit status, lines of standard output and of standard error."""

    status: int
    lines: list[str]
    errors: list[str]


def assert_refused(result: Result, *expected: str):
    """Checks for status 2, no output, and one line of error that contains all ``expected``."""
    assert result.status == 2
    assert result.lines == []
    (line,) = result.errors
    assert line.startswith("spec-t5x: error: ")
    for value in expected:
        assert value in line
