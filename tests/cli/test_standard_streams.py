"""Standard streams that are full, closed, gone, not UTF-8 or not readable."""

import contextlib
import functools
import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spec_t5x.cli import standard_streams
from spec_t5x.labs.benchmark import sweep

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs", "unchecked")

REPOSITORY = Path(__file__).parents[2]
TEXTS = ("My sister", "Der alte Käse", "a green bird")
_MODELS = ("--target", "{target}", "--draft", "{draft}", "--gamma", "3", "--max_decode_len", "16")
# One for each way of printing: lines, JSON, rich's, a table, argparse's.
COMMANDS = {
    "generate": ("generate", *_MODELS, *TEXTS),
    "json": ("generate", *_MODELS, "--json", *TEXTS),
    "trace": ("generate", *_MODELS, "--trace", *TEXTS),
    "benchmark": ("benchmark",),
    "help": ("--help",),
}


@pytest.fixture
def command(tiny_pair, monkeypatch, run):
    """Provides ``command(name)``: the result of a command of ``COMMANDS``."""
    monkeypatch.setattr(sweep, "run", lambda *_, **__: iter(()))
    monkeypatch.setattr(sweep, "best", lambda _: "Twice as fast: 2 ×, — or ▁…")
    places = {name: tiny_pair / name for name in ("target", "draft")}
    return lambda name: run(*[flag.format(**places) for flag in COMMANDS[name]])


@contextlib.contextmanager
def _gone():
    """Opens a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        yield stream


BROKEN = {
    "full": (functools.partial(open, "/dev/full", "w"), 2, "(No space left on device)"),
    "closed": (contextlib.nullcontext, 2, "standard output is closed"),
    # As of ``spec-t5x generate … | head -1``.
    "gone": (_gone, 0, None),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("name", COMMANDS)
def test_output_that_is_lost_is_an_error_of_one_line(command, name, fault, monkeypatch):
    make, status, message = BROKEN[fault]
    with make() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        result = command(name)
    assert result.status == status
    said = [line for line in result.errors if "error" in line]
    assert len(said) == (message is not None)
    assert message is None or said[0].startswith("spec-t5x: error: standard output ")
    assert message is None or message in said[0]


def test_an_interruption_without_a_reader_keeps_its_status(monkeypatch):
    def interrupted():
        print("not written yet")
        raise KeyboardInterrupt

    with _gone() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert standard_streams.guarded(interrupted) == standard_streams.INTERRUPTED


@pytest.mark.parametrize("name", COMMANDS)
def test_output_is_utf8_in_every_locale(command, name, monkeypatch):
    written = []
    for encoding in ("utf-8", "ascii", "cp1252"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        assert command(name).status == 0
        written.append(stream.buffer.getvalue().decode())
    assert written[0] == written[1] == written[2] != ""


def test_a_message_has_no_codes_of_a_terminal(capsys):
    standard_streams.complain("no \x1b]0;title\x07\x9b31m, but «schläft»\nand a line")
    shown = "spec-t5x: no \\x1b]0;title\\x07\\x9b31m, but «schläft»\nand a line\n"
    assert capsys.readouterr() == ("", shown)


def test_an_argument_is_utf8_in_every_locale(monkeypatch):
    as_bytes = "Käse".encode()
    assert standard_streams.text("Käse") == "Käse"
    assert standard_streams.text(os.fsdecode(as_bytes)) == "Käse"
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("latin-1"))
    assert standard_streams.text(as_bytes.decode("latin-1")) == "Käse"
    # An argument in the locale's own encoding stays what it is.
    assert standard_streams.text("Käse") == "Käse"
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("ascii", "surrogateescape"))
    assert standard_streams.text("K\udce4se") == "K\udce4se"


# --- in another process --------------------------------------------------------

_ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def _program(*command, shell: str = "", **environment) -> subprocess.CompletedProcess:
    """Runs ``spec-t5x`` in another process, with the shell's redirections."""
    words = [sys.executable, "-m", "spec_t5x.cli.main", *map(os.fsdecode, command)]
    values = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", **environment}
    words = ["sh", "-c", f'"$@" {shell}', "sh", *words]
    return subprocess.run([os.fsencode(word) for word in words], env=values, capture_output=True)


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ("> /dev/full", "cannot be written (No space left on device)"),
        (">&- 2>&-", None),
        ("1< /dev/null", "cannot be written (Bad file descriptor)"),
    ],
)
def test_a_program_whose_output_fails(shell, message):
    done = _program("--version", shell=shell)
    assert done.returncode == 2
    errors = done.stderr.decode().splitlines()
    assert len(errors) == (message is not None)
    assert message is None or message in errors[0]


def test_a_program_in_an_ascii_locale(tiny_pair):
    models = [part.format(target=tiny_pair / "target", draft="none") for part in _MODELS]
    # Quiet, because a slow machine also reports what it loads.
    refused = _program("generate", "-q", *models, b"K\xe4se", **_ASCII)
    assert (refused.returncode, refused.stdout) == (2, b"")
    (line,) = refused.stderr.decode().splitlines()
    assert "is not UTF-8: give UTF-8 text" in line


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ('0> "$FILE"', "cannot read standard input after line 0 (Bad file descriptor)"),
        ("<&-", "standard input holds no inputs"),
    ],
)
def test_a_program_whose_input_fails(shell, message, tiny_pair, tmp_path):
    flags = ["-q", "--target", tiny_pair / "target", "--draft", "none", "--input", "-"]
    done = _program("generate", *flags, shell=shell, FILE=str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("spec-t5x: error: ") and message in line


# --- input -----------------------------------------------------------------------


@pytest.fixture
def piped(tiny_pair, monkeypatch, run):
    """Provides ``piped(data, *flags)``: ``generate`` with the data on standard input."""
    models = [part.format(target=tiny_pair / "target", draft="none") for part in _MODELS]

    def generate(data: io.RawIOBase | bytes, *flags):
        raw = io.BytesIO(data) if isinstance(data, bytes) else data
        stream = io.TextIOWrapper(io.BufferedReader(raw), encoding="ascii")
        monkeypatch.setattr(sys, "stdin", stream)
        return run("generate", *models, *flags)

    return generate


class _Failing(io.RawIOBase):
    """Two lines, and then an error of the device."""

    def __init__(self):
        self._left = ["My sister\nDer alte K\u00e4se\n".encode()]

    def readable(self):
        return True

    def readinto(self, buffer):
        if not self._left:
            raise OSError(5, "Input/output error")
        data = self._left.pop()
        buffer[: len(data)] = data
        return len(data)


def test_lines_before_a_read_error_are_answered(piped):
    whole = piped("My sister\nDer alte Käse\n".encode())
    assert (whole.status, len(whole.lines)) == (0, 2)
    broken = piped(_Failing())
    assert (broken.status, broken.lines) == (2, whole.lines)
    (line,) = broken.errors
    assert "cannot read standard input after line 2 (Input/output error)" in line


@pytest.mark.parametrize("flags", [(), ("--input", "-", "--field", "text")])
def test_gzip_on_standard_input_is_read_as_in_a_file(piped, flags):
    lines = [json.dumps({"text": text}) if flags else text for text in TEXTS]
    data = "\n".join(lines).encode()
    whole = piped(data, *flags)
    assert (whole.status, len(whole.lines)) == (0, 3)
    # As ``cat one.gz other.gz`` joins files.
    assert piped(gzip.compress(data[:9]) + gzip.compress(data[9:]), *flags) == whole
    damaged = piped(gzip.compress(data)[:-8], *flags, "--batch_size", 4)
    assert damaged.status == 2 and "cannot read standard input after line" in damaged.errors[-1]


def test_utf16_on_standard_input_is_refused(piped):
    result = piped("My sister\nDer alte K\u00e4se\n".encode("utf-16"))
    assert (result.status, result.lines) == (2, [])
    assert result.errors[-1].startswith("spec-t5x: error: standard input is UTF-16 or UTF-32")


def test_half_of_a_surrogate_pair_is_an_escape(piped):
    result = piped(
        b'{"text": "\\ud800"}\n{"text": "My sister"}', "--json", "--field", "text", "--input", "-"
    )
    assert result.status == 2 and len(result.lines) == 2
    refused, answered = map(json.loads, result.lines)
    assert refused["input"] == "\ud800" and "is not UTF-8" in refused["error"]
    assert answered["input"] == "My sister"


@pytest.mark.parametrize("name", ["infer", "generate", "evaluate", "acceptance"])
def test_a_file_without_inputs_is_refused_by_all(run, tiny_pair, tmp_path, name):
    path = tmp_path / "empty.tsv"
    path.write_bytes(gzip.compress(b""))
    models = ["--target", tiny_pair / "target", "--draft"]
    flags = {
        "generate": [*models, "none", "--input", path],
        "infer": [*models, "none", "--input", path, "--output_dir", tmp_path / "out"],
        "evaluate": [*models, "none", "--data", path],
        "acceptance": [*models, "uniform", "--data", path],
    }[name]
    result = run(name, *flags)
    assert (result.status, result.lines) == (2, [])
    (line,) = result.errors
    assert line.startswith("spec-t5x: error: ") and "empty.tsv" in line
