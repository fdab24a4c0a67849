"""The parts of the second lane: their files exist, and changed files select them."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(REPOSITORY / "scripts" / "lanes.py"))
PARTS = SCRIPT["PARTS"]


@pytest.mark.parametrize("name", PARTS)
def test_the_files_of_a_part_exist(name):
    for path in (*PARTS[name].tests, *PARTS[name].sources):
        found = (REPOSITORY / path).parent.glob(f"{Path(path).name}*")
        assert any(found), f"{name}: there is no {path}"


def imported(path):
    """Yields the modules of tests, as paths, that a file of tests imports."""
    for package, names in re.findall(r"^from (tests\S*) import (.+)$", path.read_text(), re.M):
        for name in (package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))):
            module = f"{name.replace('.', '/')}.py"
            if (REPOSITORY / module).is_file():
                yield module


@pytest.mark.parametrize("name", PARTS)
def test_tests_that_a_part_imports_select_it(name):
    left_out, missing = SCRIPT["left_out"], set()
    for test in PARTS[name].tests:
        given = REPOSITORY / test
        for path in given.rglob("*.py") if given.is_dir() else (given,):
            missing |= {one for one in imported(path) if test in left_out([one])}
    assert sorted(missing) == []


def test_changed_files_select_parts():
    left_out = SCRIPT["left_out"]
    everything = {test for part in PARTS.values() for test in part.tests}
    assert set(left_out(["tests/labs/theory/test_formulas.py"])) == everything
    for shared in (None, ["tests/conftest.py"], ["README.md", "setup.py"]):
        assert left_out(shared) == []
    kept = everything - set(left_out(["spec_t5x/contrib/cpu/calls.py"]))
    assert kept == set(PARTS["contrib"].tests)
    # A part's tests are among its files.
    for part in PARTS.values():
        assert not set(part.tests) & set(left_out(part.tests))


def test_without_a_history_every_part_runs(monkeypatch):
    def fail(command, **_):
        raise subprocess.CalledProcessError(128, command)

    monkeypatch.setattr(subprocess, "run", fail)
    assert SCRIPT["changed_files"]() is None


def test_the_base_is_that_of_ci(monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, 0, stdout="1700000000\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("CI_BASE", "v1")
    SCRIPT["changed_files"]()
    assert commands[-1] == ["diff", "--name-only", "v1"]
