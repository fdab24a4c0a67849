"""Results are kept under all that they depend on, with their provenance."""

import re
import subprocess
from unittest.mock import Mock

import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.reproduction import kept_results
from spec_t5x.labs.reproduction.contents import ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Results, reason

MACHINE = {"processor": "x", "threads": 2, "jax": "2", "spec_t5x": "1"}
KEPT = {"rows": [[1, 0.5, None]], "tokens": 7}


@pytest.fixture
def measure():
    return Mock(return_value={"rows": [(1, 0.5, None)], "tokens": 7})


@pytest.fixture
def results(tmp_path):
    """Provides ``results(machine)``: the results of a new run."""

    def make(machine=MACHINE):
        return Results(tmp_path / "cache", {"machine": machine, "commit": "abc", "seed": 3})

    return make


def test_a_result_is_measured_once_and_kept_with_its_provenance(results, measure, monkeypatch):
    monkeypatch.setattr(kept_results, "OtherPrograms", lambda: Mock(share=0.45))
    first = results()
    # As a file gives it back.
    assert first("a", {"b": (2, 3), "n": 1}, measure) == KEPT
    assert first("a", {"b": (2, 3), "n": 1}, measure) == KEPT
    again = results(MACHINE | {"spec_t5x": "2"})
    assert again("a", {"n": 1, "b": [2, 3]}, measure) == KEPT
    assert measure.call_count == 1
    provenance = again.found["a"]["provenance"]
    assert provenance["commit"] == "abc" and provenance["seed"] == 3 and "date" in provenance
    assert provenance["beside"] == 0.45


@pytest.mark.parametrize(
    ("name", "inputs", "machine"),
    [
        ("a", {"n": 2}, MACHINE),
        ("b", {"n": 1}, MACHINE),
        ("a", {"n": 1}, MACHINE | {"threads": 4}),
        ("a", {"n": 1}, MACHINE | {"jax": "3"}),
    ],
)
def test_other_inputs_or_machines_are_measured_again(results, measure, name, inputs, machine):
    results()("a", {"n": 1}, measure)
    results(machine)(name, inputs, measure)
    assert measure.call_count == 2


def test_a_damaged_file_is_not_used(results, measure, tmp_path):
    results()("a", {"n": 1}, measure)
    (path,) = (tmp_path / "cache").iterdir()
    path.write_text(path.read_text().replace('"result"', '"other"'))
    assert results()("a", {"n": 1}, measure) == KEPT
    assert measure.call_count == 2


def test_a_failure_is_noted_and_not_tried_again(results):
    fail, run = Mock(side_effect=KeyError("gone")), results()
    assert run("a", {}, fail) is run("a", {}, fail) is None
    assert (run.failed, fail.call_count) == ({"a": "KeyError: 'gone'"}, 1)
    # A result that JSON cannot hold is a failure.
    run("b", {}, lambda: {1, 2})
    assert "not JSON serializable" in run.failed["b"]
    assert reason(InputError("x is 3: give 4")) == "x is 3: give 4"
    assert reason(RuntimeError("a\nb")) == "RuntimeError: a b"
    assert reason(RuntimeError()) == "RuntimeError"


def test_a_result_that_cannot_be_kept_ends_the_run(results, measure, tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(OSError, match="cannot be written"):
        results()("a", {}, measure)


# Provenance


def git(folder, *arguments):
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return result.stdout.strip()


def test_the_commit_is_named_with_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_results, "_CHECKOUT", tmp_path)
    assert kept_results.commit() is None
    git(tmp_path, "init")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert kept_results.commit() == head[:12]
    (tmp_path / "file").write_text("2")
    assert kept_results.commit() == f"{head[:12]}+changes"
    # An installation in a folder of another repository.
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(kept_results, "_CHECKOUT", tmp_path / "site-packages")
    assert kept_results.commit() is None


def test_the_origin_has_machine_and_options_without_paths():
    origin = kept_results.origin(ReproduceOptions(seed=3, data_dir="/home/me/texts"))
    machine = origin["machine"]
    assert machine["platform"] == "cpu" and machine["threads"] >= 1 and machine["processor"]
    assert re.match(r"\d+\.\d+", machine["jax"])
    assert (origin["seed"], origin["quick"], origin["data_dir"]) == (3, False, "texts")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", kept_results.now())


def test_results_of_several_commits_have_a_line_each():
    def found(commit, tokens, date):
        machine = {"device": "cpu", "platform": "cpu", "processor": "X", "threads": 2}
        origin = {"machine": machine, "commit": commit, "seed": 1, "seconds": 70.0}
        origin |= {"date": f"{date} 10:00:00 UTC"}
        return {"result": {"tokens": tokens}, "provenance": origin}

    results = [
        found("abc", 1000, "2025-01-02"),
        found("abc", 234, "2025-01-01"),
        found(None, 0, "2025-01-03"),
    ]
    assert kept_results.lines(results) == [
        "X, 2 cores (cpu), commit abc, seed 1, 1,234 tokens counted, 2025-01-01 to 2025-01-02, "
        "took 140 s",
        "X, 2 cores (cpu), not from a checkout, seed 1, 2025-01-03, took 70 s",
    ]
