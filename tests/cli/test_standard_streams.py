"""Standard streams that are full, closed, gone, not UTF-8 or not readable, under every command."""

import contextlib
import functools
import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import gin
import pytest

from spec_t5x.cli import standard_streams
from spec_t5x.cli.main import main
from spec_t5x.labs.benchmark import sweep
from spec_t5x.labs.tpu import compilation

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs", "unchecked")

REPOSITORY = Path(__file__).parents[2]
TEXTS = ("My sister", "Der alte Käse", "a green bird")
_MODELS = ("--target", "{target}", "--draft", "{draft}", "--gamma", "3", "--max_decode_len", "16")
_NUMBERS = ("--num_tokens", "20", "--max_decode_len", "8", "--decoded_texts", "0")
_COUNTING = ("train-ngram", "--data", "{texts}", "--min_count", "1")
COMMANDS = {
    "generate": ("generate", *_MODELS, *TEXTS),
    "json": ("generate", *_MODELS, "--json", *TEXTS),
    "trace": ("generate", *_MODELS, "--trace", *TEXTS),
    "compare": ("generate", *_MODELS, "--compare", TEXTS[0]),
    "infer": ("infer", *_MODELS, "--input", "{texts}", "--output_dir", "{new}"),
    "evaluate": ("evaluate", *_MODELS, "--data", "{pairs}"),
    "acceptance": ("acceptance", *_MODELS[:4], *_NUMBERS, TEXTS[0]),
    "benchmark": ("benchmark",),
    "train-ngram": (*_COUNTING, "--vocabulary", "{target}", "--output", "{new}"),
    "convert": ("convert", "{target}", "{new}", "--to", "native"),
    "compile-tpu": ("compile-tpu",),
    "reproduce": ("reproduce", "--list"),
    "doctor": ("doctor",),
    "doctor-json": ("doctor", "--json"),
    "help": ("--help",),
    "version": ("--version",),
    "help-of-a-command": ("infer", "--help"),
}


@pytest.fixture
def command(tiny_pair, tmp_path, monkeypatch):
    """``command(name)``: the exit status of a command of ``COMMANDS``; measurements are empty."""
    (tmp_path / "texts").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    (tmp_path / "pairs.tsv").write_text(f"{TEXTS[0]}\t{TEXTS[1]}\n", encoding="utf-8")
    for module in (sweep, compilation):
        monkeypatch.setattr(module, "run", lambda *_, **__: iter(()))
    monkeypatch.setattr(sweep, "best", lambda _: "Twice as fast: 2 ×, — or ▁…")
    places = {name: tiny_pair / name for name in ("target", "draft")}
    places |= {"texts": tmp_path / "texts", "pairs": tmp_path / "pairs.tsv"}
    numbers = iter(range(9))

    def run(name: str) -> int:
        gin.clear_config()
        flags = COMMANDS[name]
        if name == "evaluate":
            pytest.importorskip("seqio")
        new = tmp_path / f"new{next(numbers)}"
        try:
            return main([flag.format(**places, new=new) for flag in flags])
        except SystemExit as end:
            return end.code

    return run


@contextlib.contextmanager
def _gone():
    """A pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        yield stream


@contextlib.contextmanager
def _read_only():
    with open(os.open(os.devnull, os.O_RDONLY), "w") as stream:
        yield stream


BROKEN = {
    "full": (functools.partial(open, "/dev/full", "w"), 2, "(No space left on device)"),
    "read-only": (_read_only, 2, "(Bad file descriptor)"),
    "closed": (contextlib.nullcontext, 2, "standard output is closed"),
    "gone": (_gone, 0, None),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("name", COMMANDS)
def test_output_that_is_lost_is_an_error_of_one_line(command, name, fault, monkeypatch, capsys):
    """But a reader that leaves, as ``head`` does, is none."""
    make, status, message = BROKEN[fault]
    with make() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert command(name) == status
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    if message is None:
        assert said == []
    else:
        (line,) = said
        assert line.startswith("spec-t5x: error: standard output ") and message in line


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("name", COMMANDS)
def test_output_is_utf8_in_every_locale(command, name, encoding, monkeypatch):
    written = []
    for each in ("utf-8", encoding):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=each)
        monkeypatch.setattr(sys, "stdout", stream)
        assert command(name) == 0
        written.append(stream.buffer.getvalue().decode())
    # Some hold times, and a comparison what follows from them.
    usual, here = (text.count("\n") for text in written)
    assert usual == here > 0 or (name == "compare" and here > 0)
    if name in ("generate", "json", "trace", "benchmark", "reproduce"):
        assert written[0] == written[1]


def test_an_argument_is_utf8_in_every_locale(monkeypatch):
    as_bytes = "Käse".encode()
    assert standard_streams.text("Käse") == "Käse"
    assert standard_streams.text(os.fsdecode(as_bytes)) == "Käse"
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("latin-1"))
    assert standard_streams.text(as_bytes.decode("latin-1")) == "Käse"
    # An argument in the locale's own encoding stays what it is.
    assert standard_streams.text("Käse") == "Käse"
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("ascii", "surrogateescape"))
    assert standard_streams.text(as_bytes.decode("ascii", "surrogateescape")) == "Käse"
    assert standard_streams.text("K\udce4se") == "K\udce4se"


# --- as a program --------------------------------------------------------------

_ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def _program(*command, shell: str = "", **environment) -> subprocess.CompletedProcess:
    """``spec-t5x`` in a process of its own, with the shell's redirections."""
    words = [sys.executable, "-m", "spec_t5x.cli.main", *map(os.fsdecode, command)]
    values = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", **environment}
    values = {os.fsencode(name): os.fsencode(value) for name, value in values.items()}
    words = ["sh", "-c", f'"$@" {shell}', "sh", *words]
    return subprocess.run([os.fsencode(word) for word in words], env=values, capture_output=True)


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["", "unbuffered"])
@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ("> /dev/full", "cannot be written (No space left on device)"),
        (">&-", "is closed"),
        (">&- 2>&-", None),
        ("> /dev/full 2> /dev/full", None),
        ("1< /dev/null", "cannot be written (Bad file descriptor)"),
    ],
)
def test_a_program_whose_output_fails(shell, message, unbuffered):
    done = _program("--version", shell=shell, **unbuffered)
    assert done.returncode == 2
    errors = done.stderr.decode().splitlines()
    assert len(errors) == (message is not None)
    assert message is None or message in errors[0]


@pytest.mark.parametrize("locale", [_ASCII, {"PYTHONIOENCODING": "ascii"}], ids=["C", "ascii"])
def test_a_program_in_an_ascii_locale(locale, tiny_pair, kept_programs):
    models = [part.format(target=tiny_pair / "target", draft="none") for part in _MODELS]
    cache = {"JAX_COMPILATION_CACHE_DIR": kept_programs, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = _program("generate", "-q", *models, "--json", "--stop", "Ä", TEXTS[1], **locale, **cache)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["input"] == TEXTS[1]
    refused = _program("generate", *models, b"K\xe4se", **locale, **cache)
    assert (refused.returncode, refused.stdout) == (2, b"")
    (line,) = refused.stderr.decode().splitlines()
    assert "is not UTF-8: give UTF-8 text" in line


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ("0> FILE", "cannot read standard input after line 0 (Bad file descriptor)"),
        ("<&-", "standard input holds no inputs"),
        ("< /dev/null", "standard input holds no inputs"),
    ],
)
def test_a_program_whose_input_fails(shell, message, tiny_pair, tmp_path):
    flags = ["--target", tiny_pair / "target", "--draft", "none", "--input", "-"]
    done = _program("generate", *flags, shell=shell.replace("FILE", str(tmp_path / "file")))
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("spec-t5x: error: ") and message in line


# --- what is read ----------------------------------------------------------------


@pytest.fixture
def piped(tiny_pair, monkeypatch, run):
    """``piped(data, *flags)``: ``generate`` of what is on standard input."""
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


@pytest.mark.parametrize("batch_size", [1, 4])
def test_lines_before_the_end_of_a_file_that_is_cut_short_are_answered(
    run, tiny_pair, tmp_path, batch_size
):
    models = [part.format(target=tiny_pair / "target", draft="none") for part in _MODELS]
    path = tmp_path / "lines.gz"
    text = "".join(f"{text}\n" for text in TEXTS)
    path.write_bytes(gzip.compress(text.encode()))
    flags = ("generate", *models, "--batch_size", batch_size, "--input", path)
    whole = run(*flags)
    assert (whole.status, len(whole.lines)) == (0, 3)
    # All of the text, but not its checksum.
    path.write_bytes(path.read_bytes()[:-8])
    cut = run(*flags)
    assert (cut.status, cut.lines) == (2, whole.lines)
    assert "cannot read" in cut.errors[-1] and "give a complete file" in cut.errors[-1]


@pytest.mark.parametrize("flags", [(), ("--input", "-"), ("--input", "-", "--field", "text")])
def test_gzip_on_standard_input_is_read_as_in_a_file(piped, flags):
    lines = [json.dumps({"text": text}) if "--field" in flags else text for text in TEXTS]
    data = "\n".join(lines).encode()
    whole = piped(data, *flags)
    assert (whole.status, len(whole.lines)) == (0, 3)
    # As ``cat one.gz other.gz`` joins files.
    assert piped(gzip.compress(data[:9]) + gzip.compress(data[9:]), *flags) == whole
    damaged = piped(gzip.compress(data)[:-9], *flags)
    assert damaged.status == 2 and "cannot read standard input after line" in damaged.errors[-1]


def test_half_of_a_surrogate_pair_is_an_escape(piped):
    result = piped(
        b'{"text": "\\ud800"}\n{"text": "My sister"}', "--json", "--field", "text", "--input", "-"
    )
    assert result.status == 2 and len(result.lines) == 2
    refused, answered = map(json.loads, result.lines)
    assert refused["input"] == "\ud800" and "is not UTF-8" in refused["error"]
    assert answered["input"] == "My sister"


@pytest.mark.parametrize("data", [b"", gzip.compress(b"")], ids=["empty", "gzip"])
@pytest.mark.parametrize("name", ["infer", "generate", "evaluate", "acceptance"])
def test_a_file_without_inputs_is_refused_by_all(run, tiny_pair, tmp_path, name, data):
    path = tmp_path / "empty.tsv"
    path.write_bytes(data)
    models = ["--target", tiny_pair / "target", "--draft", "none"]
    flags = {
        "generate": [*models, "--input", path],
        "infer": [*models, "--input", path, "--output_dir", tmp_path / "out"],
        "evaluate": [*models, "--data", path],
        "acceptance": [*models[:3], "uniform", "--data", path],
    }[name]
    result = run(name, *flags)
    assert (result.status, result.lines) == (2, [])
    (line,) = result.errors
    assert line.startswith("spec-t5x: error: ") and "empty.tsv" in line
