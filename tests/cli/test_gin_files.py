"""Places of gin files, and errors of those that cannot be used."""

import sys

import gin
import pytest

from spec_t5x.cli import gin_files
from spec_t5x.cli.gin_files import add_search_paths, parse_gin
from spec_t5x.errors import InputError


@pytest.fixture(autouse=True)
def search_paths_as_they_were(monkeypatch):
    monkeypatch.setattr(gin_files, "_search_paths", list(gin_files._search_paths))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes ``top/top.gin``, which includes ``parts/part.gin``, which includes ``inner.gin``."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "top" / "top.gin", "include 'parts/part.gin'\nTOP = 1")
    write(tmp_path / "top" / "parts" / "part.gin", 'include "inner.gin"  # beside it\nPART = %TOP')
    write(tmp_path / "top" / "parts" / "inner.gin", "INNER = 3")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def macro(name):
    return gin.query_parameter(f"%{name}")


def test_includes_are_found_beside_the_file_that_includes_them(folder):
    parse_gin(["top/top.gin"], ["--gin.TOP=5"])
    assert (macro("TOP"), macro("INNER")) == (5, 3)


def test_includes_are_found_in_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "mine.gin", "include 'gin_configs/data/prefixed.gin'")
    from spec_t5x.labs.training import run_train  # noqa: F401, what the file binds

    parse_gin([str(path)], [])
    assert gin.query_parameter("DataOptions.num_columns") == 2


def test_files_and_includes_are_found_in_search_paths(folder):
    write(folder / "elsewhere" / "run.gin", "include 'more/deep.gin'")
    write(folder / "library" / "more" / "deep.gin", "DEEP = 7")
    add_search_paths(["elsewhere", "library"])
    parse_gin(["run.gin"], [])
    assert macro("DEEP") == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("include 'absent.gin'", r"mine.gin includes absent.gin, which does not exist"),
        ("include 'mine.gin'", "mine.gin includes itself"),
        ("A = %ABSENT", "mine.gin needs the macro ABSENT"),
        ("A = %gin.REQUIRED\nB = %A", "needs the macro A: add --gin.A=VALUE"),
        ("A = (%B, %C, %B)", "needs the macros B, C: add --gin.B=VALUE --gin.C=VALUE$"),
        ("include 'part.gin'", "part.gin needs the macro LEFT_OPEN"),
        ("\nA = train.tsv", r"gin: mine.gin: Failed to parse token 'train' \(line 2\): fix it"),
        ("\n\nA.b = 3", r"gin: mine.gin: No configurable matching 'A'. In line 3"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "part.gin", "C = %LEFT_OPEN")
    write(tmp_path / "mine.gin", text)
    with pytest.raises(InputError, match=message):
        parse_gin(["mine.gin"], [])


def test_an_extra_that_a_file_imports_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "seqio", None)
    monkeypatch.delitem(sys.modules, "spec_t5x.labs.local_tasks", raising=False)
    path = write(tmp_path / "mine.gin", "import spec_t5x.labs.local_tasks")
    with pytest.raises(InputError) as caught:
        parse_gin([str(path)], [])
    # gin adds lines, which the command line leaves out.
    first = str(caught.value).splitlines()[0]
    assert first == "seqio tasks: seqio is not installed: pip install 'spec_t5x[tasks]'"


def test_a_required_macro_may_be_bound_by_a_flag(tmp_path):
    path = write(tmp_path / "mine.gin", "A = %gin.REQUIRED\nB = %A  # %COMMENT\nC = '%TEXT'")
    parse_gin([str(path)], ["--gin.A='x'"])
    assert macro("A") == "x"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # A path needs no quotes.
        *((path, path) for path in ("dev.tsv.gz", "/data/dev.tsv", "../x-1/dev.tsv")),
        *((path, path) for path in ("gs://bucket/run", "some:task")),
        # Nor does a prefix, from which the shell removed them.
        ("correct: ", "correct: "),
        # Values of gin are left as they are.
        *(("'x'", "x"), ("6", 6), ("None", None), ("True", True)),
        *(("1e-3", 1e-3), ("(1, 2)", (1, 2))),
        # A shell's spelling; gin's text of it would be true.
        *(("true", True), ("false", False), ("'false'", "false")),
    ],
)
def test_values_of_flags(tmp_path, value, expected):
    path = write(tmp_path / "mine.gin", "B = %A")
    parse_gin([str(path)], [f"--gin.A={value}"])
    assert macro("A") == expected


def test_a_flag_that_gin_cannot_read_is_named(tmp_path):
    path = write(tmp_path / "mine.gin", "B = %A")
    message = (
        r"gin: --gin.A=test\[:9\]: Failed to parse token 'test' \(line 1\): fix it, text needs"
    )
    with pytest.raises(InputError, match=message):
        parse_gin([str(path)], ["--gin.A=test[:9]"])


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--gin.GAMA=6", "nothing uses --gin.GAMA, did you mean 'GAMMA'"),
        ("--gin.COLOUR=6", "nothing uses --gin.COLOUR: leave it out"),
        ("--gin.x/GAMMA=6", "nothing uses --gin.x/GAMMA, did you mean 'GAMMA'"),
    ],
)
def test_a_macro_that_nothing_uses_is_refused(tmp_path, flag, message):
    path = write(tmp_path / "mine.gin", "B = %GAMMA  # not %COLOUR\nGAMMA = 4")
    with pytest.raises(InputError, match=message):
        parse_gin([str(path)], [flag])
