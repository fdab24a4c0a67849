"""``spec-t5x`` as a whole: levels of its log, completion, and imports of ``--help``."""

import dataclasses
import logging
import os
import signal
import sys
import time
import weakref

import jax
import pytest

from spec_t5x.checkpoints.named_models import Models
from spec_t5x.cli import main
from spec_t5x.generation import Generator
from spec_t5x.machine import accelerators
from spec_t5x.names import AUTO
from tests.child import HANGS, REPOSITORY, finished, printed

pytestmark = pytest.mark.usefixtures("unchecked", "quick_compilation", "kept_programs")

# Runs a command, then prints which heavy modules it has imported.
PROGRAM = """
import atexit, os, sys
exit, os._exit = os._exit, lambda status: (print(*loaded()), sys.stdout.flush(), exit(status))
loaded = lambda: [name for name in ("jax", "flax", "tensorflow") if name in sys.modules]
atexit.register(lambda: print(*loaded()))
from spec_t5x.cli.main import main
main()
"""


def program(*arguments, **environment) -> str:
    paths = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    return printed("-c", PROGRAM, *arguments, **paths | environment)


def test_a_shell_completes_commands_and_flags_without_jax(tmp_path):
    pytest.importorskip("argcomplete")
    for line, expected in (
        ("spec-t5x ", {"generate", "infer", "doctor"}),
        ("spec-t5x generate --draft", {"--draft", "--draft_top_k"}),
        ("spec-t5x generate --verifier t", {"token", "tree"}),
    ):
        protocol = {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_SHELL": "bash",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answers"),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        assert program(**protocol).strip() == ""
        offered = {word.strip() for word in (tmp_path / "answers").read_text().split("\n")}
        assert expected <= offered


def test_help_shows_defaults_and_imports_no_jax():
    shown = " ".join(program("infer", "--help").split())
    assert "inputs in a shard; a killed run repeats unfinished shards (default: 1024)" in shown
    assert "(default: the checkpoint's, or 128)" in shown
    assert not shown.endswith("jax")


@pytest.fixture
def generate(run, tiny_pair, tmp_path):
    """Provides ``generate(*flags)`` for a good text, one that is too long, and a good one."""
    path = tmp_path / "texts"
    path.write_text(f"Es regnet.\n{'Es regnet. ' * 20}\nMy sister\n", encoding="utf-8")
    pair = ("--target", tiny_pair / "target", "--draft", tiny_pair / "draft")
    flags = (*pair, "--gamma", 2, "--max_decode_len", 16, "--input", path)
    return lambda *more: run("generate", *flags, *more)


def test_quiet_is_errors_alone_and_verbose_tells_what_was_loaded(generate, tiny_pair):
    usual, quiet, verbose = generate(), generate("-q"), generate("--verbose")
    assert usual.status == quiet.status == verbose.status == 2
    assert usual.lines == quiet.lines == verbose.lines
    (error,) = quiet.errors
    assert error.startswith("spec-t5x: line 2: ")
    assert error in usual.errors and error in verbose.errors
    loaded = f"spec-t5x: loading {tiny_pair / 'target'}: "
    assert [line.startswith(loaded) for line in verbose.errors].count(True) == 1
    assert not any("loading" in line for line in usual.errors)


def _dropped():
    """Interrupts where Python drops exceptions."""

    class Referent:
        pass

    one = Referent()
    reference = weakref.ref(one, lambda _: signal.raise_signal(signal.SIGINT))
    del one
    assert reference() is None
    time.sleep(HANGS)


def _converted():
    """Interrupts where another exception replaces it, as when a library in C is imported."""
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        raise ImportError("initialization failed")


@pytest.mark.parametrize("interrupt", [_dropped, _converted])
def test_an_interruption_ends_a_command_wherever_it_comes(run, monkeypatch, interrupt):
    monkeypatch.setattr(Generator, "open", lambda *_, **__: interrupt())
    assert run("generate", "text") == (130, [], [])


def test_an_interruption_ends_a_command_while_its_modules_are_imported(run, monkeypatch):
    monkeypatch.setattr("spec_t5x.cli.main._modules", lambda: signal.raise_signal(signal.SIGINT))
    assert run("generate", "text") == (130, [], [])


def test_a_line_comes_once_and_logging_is_left_as_it_was(run, monkeypatch):
    """Another library may have configured logging."""
    log, root = logging.getLogger("spec_t5x"), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [*root.handlers, logging.StreamHandler()])
    before = (log.level, log.propagate, list(log.handlers))
    result = run("generate", "--gamma", "x", "text")
    assert (result.status, len(result.errors)) == (2, 1)
    assert result.errors[0].startswith("spec-t5x: error: --gamma is 'x'")
    assert (log.level, log.propagate, list(log.handlers)) == before
    assert "not allowed with" in run("generate", "-q", "-v", "x").errors[0]


@pytest.mark.parametrize("command", ["convert a b --to t5x", "doctor"])
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--gin.GAMMA=2", "{} reads no gin settings: leave out --gin.GAMMA=2"),
        ("--gin_search_paths=a", "unknown argument '--gin_search_paths=a': see spec-t5x {} --help"),
    ],
)
def test_a_command_without_gin_refuses_its_flags(run, command, flag, message):
    result = run(*command.split(), flag)
    assert (result.status, len(result.errors)) == (2, 1)
    assert message.format(command.split()[0]) in result.errors[0]


@pytest.mark.parametrize("command", ["generate", "demo", "evaluate", "acceptance", "benchmark"])
def test_what_loads_models_has_every_flag_of_theirs(command):
    fields = dataclasses.fields(Models)
    given = [f"--{each.name}={AUTO if each.default == AUTO else 1}" for each in fields]
    assert main._parser().parse_known_args([command, *given])[1] == []


def test_help_names_bindings_where_they_are_read():
    commands = main._parser()._subparsers._group_actions[0].choices
    for name, command in commands.items():
        shown = command.format_help()
        assert ("--gin.NAME=VALUE" in shown) == ("--gin_file" in shown), name
    assert "--gin_file" in commands["train"].format_help()


def test_a_full_device_is_a_line(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(Generator, "load_named", full)
    result = run("generate", "text")
    assert result.status == 2
    (line,) = result.errors
    assert "the device's memory is full: give smaller batches, shorter texts" in line
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        run("generate", "--debug", "text")
    (tmp_path / "lines.txt").write_text("text\n")
    given = "--input", tmp_path / "lines.txt", "--output_dir", tmp_path / "out"
    (line,) = run("infer", "--quiet", *map(str, given)).errors
    assert line.endswith("a smaller model, or --dtype bfloat16, or a larger --model_parallel")


def test_a_path_that_the_system_refuses_is_a_line(run, monkeypatch):
    refusal = PermissionError(13, "Permission denied", "/home/other/model")

    def refuse(*_, **__):
        raise refusal

    monkeypatch.setattr(Generator, "open", refuse)
    line = "spec-t5x: error: cannot use /home/other/model (Permission denied): give another path"
    assert run("generate", "text") == (2, [], [line])
    with pytest.raises(PermissionError):
        run("generate", "--debug", "text")
    refusal.filename = None
    with pytest.raises(PermissionError):
        run("generate", "text")


def test_a_tpu_of_another_process_is_a_line(run, monkeypatch):
    why = "Unable to initialize backend 'tpu': ABORTED: The TPU is in use by process 7"

    def taken(*_):
        raise RuntimeError(f"{why}. (set JAX_PLATFORMS='' to choose an available backend)")

    monkeypatch.setattr(jax, "devices", taken)
    monkeypatch.setattr(accelerators, "present", lambda: accelerators.TPU)
    monkeypatch.setattr(accelerators, "version", lambda name: "1.0")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    result = run("generate", "text")
    end = "libtpu does not start, end the other processes that hold the TPU, and restart Python"
    assert (result.status, result.errors) == (2, [f"spec-t5x: error: {why}: {end}"])


def test_a_variable_that_jax_refuses_is_a_line():
    command = sys.executable, "-m", "spec_t5x.cli.main", "generate", "text"
    done = finished(*command, JAX_ENABLE_X64="maybe")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("spec-t5x: error: JAX cannot be imported (") and "'maybe'" in line
