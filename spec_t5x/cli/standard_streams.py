"""Standard input, output and error: UTF-8 in every locale, failures reported in one line."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any

# Exit status after Ctrl-C, as of a shell's commands.
INTERRUPTED = 130
# Error handler of each stream. Input bytes that are not UTF-8 become surrogates, which are
# reported as their input's error; a surrogate in the output is written as an escape.
_ERRORS = {"stdin": "surrogateescape", "stdout": "backslashreplace", "stderr": "backslashreplace"}


def text(argument: str) -> str:
    """Decodes a text argument as UTF-8 in every locale; returns it as it is if it is not UTF-8.

    Arguments that are paths are not decoded: they keep the file system's encoding.
    """
    with contextlib.suppress(UnicodeError):
        return os.fsencode(argument).decode()
    return argument


def complain(message: str) -> None:
    """Prints ``spec-t5x: message`` to standard error; does nothing if that fails."""
    # Names in a file may hold codes that a terminal would obey.
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in message)
    with contextlib.suppress(OSError):
        print(f"spec-t5x: {shown}", file=sys.stderr, flush=True)


def guarded(run: Callable[[], int]) -> int:
    """Runs a command; returns its exit status: 130 after Ctrl-C, 2 if its output is not written.

    A reader that closes the pipe early, as ``head`` does, is not an error.
    """
    _prepare()
    if sys.stdout is None:
        complain("error: standard output is closed: open it, for instance by > FILE")
        return 2
    status = 0
    try:
        with contextlib.redirect_stdout(_Output(sys.stdout)):
            try:
                status = run()
            except KeyboardInterrupt:
                status = INTERRUPTED
            finally:
                # Unwritten output would fail at the interpreter's end, outside of any handler.
                sys.stdout.flush()
        return status
    except _OutputError as lost:
        # The interpreter flushes again at its end, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        failure = lost.__cause__
    if isinstance(failure, BrokenPipeError):
        return status
    complain(
        f"error: standard output cannot be written ({failure.strerror}): free some space, or "
        "redirect it to another file"
    )
    return 2


class _OutputError(Exception):
    """Failure to write standard output, by its cause; an ``OSError`` could be of any file."""


class _Output:
    """Wrapper of standard output that turns ``OSError`` into ``_OutputError``."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._attempt("write", text)

    def flush(self) -> None:
        self._attempt("flush")

    def _attempt(self, method: str, *arguments: str) -> Any:
        try:
            return getattr(self._stream, method)(*arguments)
        except OSError as error:
            raise _OutputError from error


def _prepare() -> None:
    """Makes the streams UTF-8; opens a closed standard input or error on the null device."""
    for name, errors in _ERRORS.items():
        stream = getattr(sys, name)
        if stream is None and name != "stdout":
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            # A stream that was read, by an earlier command in the process, refuses the change.
            with contextlib.suppress(io.UnsupportedOperation):
                stream.reconfigure(encoding="utf-8", errors=errors)
