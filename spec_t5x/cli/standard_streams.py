"""Standard input, output and error of the commands: UTF-8 in every locale, failures in a line."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any

# By stream: the treatment of what is no UTF-8. Bytes are kept, to be reported as their input's
# error; half of a surrogate pair is written as an escape.
_ERRORS = {"stdin": "surrogateescape", "stdout": "backslashreplace", "stderr": "backslashreplace"}


def text(argument: str) -> str:
    """Reads a command's argument as UTF-8 in every locale, as files are read.

    Paths keep the bytes of the file system and are not read so.
    """
    with contextlib.suppress(UnicodeError):
        return os.fsencode(argument).decode()
    return argument


def complain(message: str) -> None:
    """Prints a line to standard error, if that can be written."""
    with contextlib.suppress(OSError):
        print(f"spec-t5x: {message}", file=sys.stderr, flush=True)


def guarded(run: Callable[[], int]) -> int:
    """Runs a command on prepared streams and returns its exit status, 2 if its output is lost.

    A reader that leaves early, as ``head`` does, is no error.
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
            finally:
                # Unwritten output would fail at the interpreter's end, outside of any handler.
                sys.stdout.flush()
        return status
    except _OutputError as lost:
        # The interpreter flushes once more.
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
    """The failure of standard output, its cause; no ``OSError``, which may be of any file."""


class _Output:
    """Standard output, whose failures are ``_OutputError``."""

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
    """Makes the streams UTF-8, and opens those that the caller has closed, except for output."""
    for name, errors in _ERRORS.items():
        stream = getattr(sys, name)
        if stream is None and name != "stdout":
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            # Refused by an input that was read from, as in a second command of a process.
            with contextlib.suppress(io.UnsupportedOperation):
                stream.reconfigure(encoding="utf-8", errors=errors)
