"""Compiling the kernels, and doing without them."""

import os
import subprocess
import sys

import pytest

from spec_t5x.cpu_kernels import library

ASK = "from spec_t5x.cpu_kernels.library import available; print(available())"


def ask(**environment):
    run = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip(), run.stderr


def test_what_is_built_is_kept(tmp_path, monkeypatch):
    compiler = library._compiler()
    built = library.build(compiler, tmp_path)
    assert [built] == list(tmp_path.iterdir())
    monkeypatch.setattr(library.subprocess, "run", _only_versions(subprocess.run))
    assert library.build(compiler, tmp_path) == built


def _only_versions(run):
    def checked(command, **options):
        assert "--version" in command, "compiled again"
        return run(command, **options)

    return checked


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({library.SWITCH: "0"}, ""),
        ({"CXX": "no-such-compiler"}, "there is no C++ compiler: install g++"),
        # A compiler that refuses everything, in an empty cache.
        ({"CXX": "false"}, "could not build them"),
    ],
)
def test_without_them_one_line_says_why(tmp_path, environment, said):
    answer, errors = ask(XDG_CACHE_HOME=str(tmp_path), **environment)
    lines = [line for line in errors.splitlines() if "spec-t5x" in line]
    assert answer == "False"
    assert len(lines) == (1 if said else 0)
    assert not said or said in lines[0]
