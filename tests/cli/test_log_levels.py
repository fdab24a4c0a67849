"""How much a command says: ``-q``, ``-v``, and nothing of it twice."""

import logging

import pytest

pytestmark = pytest.mark.usefixtures("unchecked", "quick_compilation", "kept_programs")


@pytest.fixture
def generate(run, tiny_pair, tmp_path):
    """``generate(*flags)``: a good text, one that is too long, and a good one."""
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


def test_one_or_the_other(run):
    result = run("generate", "-q", "-v", "x")
    assert (result.status, len(result.errors)) == (2, 1)
    assert "not allowed with" in result.errors[0]


def test_a_line_comes_once_and_logging_is_left_as_it_was(run, monkeypatch):
    """Where a library that a command imports has configured logging."""
    log, root = logging.getLogger("spec_t5x"), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [*root.handlers, logging.StreamHandler()])
    before = (log.level, log.propagate, list(log.handlers))
    result = run("generate", "--gamma", "x", "text")
    assert (result.status, len(result.errors)) == (2, 1)
    assert result.errors[0].startswith("spec-t5x: error: --gamma is 'x'")
    assert (log.level, log.propagate, list(log.handlers)) == before
