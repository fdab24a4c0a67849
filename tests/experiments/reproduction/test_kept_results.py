"""What is kept under which name, and what is not trusted."""

import json

import pytest

from spec_t5x.errors import InputError
from spec_t5x.experiments.reproduction.kept_results import Results, one_line

ORIGIN = {
    "machine": {"processor": "x", "cores": 2},
    "versions": {"spec_t5x": "1", "jax": "2"},
    "commit": "abc",
}


class Counted:
    """Measures, and counts how often."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return {"rows": [(1, 0.5, None)], "tokens": 7}


@pytest.fixture
def counted():
    return Counted()


@pytest.fixture
def results(tmp_path):
    """``results(**changes)``: as a new run has them."""

    def make(**changes):
        origin = ORIGIN | {k: changes.pop(k) for k in ("machine", "versions") if k in changes}
        changes = {"before": lambda name, seconds: None} | changes
        return Results(tmp_path / "cache", origin, {"seed": 3}, **changes)

    return make


def test_a_result_is_measured_once_and_kept_with_its_provenance(results, counted):
    first = results()
    kept = {"rows": [[1, 0.5, None]], "tokens": 7}
    # As a file gives it back.
    assert first("a", {"b": (2, 3), "n": 1}, 1.0, counted) == kept
    assert first("a", {"b": (2, 3), "n": 1}, 1.0, counted) == kept
    again = results(versions={"spec_t5x": "2", "jax": "2"})
    assert again.kept("a", {"n": 1, "b": [2, 3]}) == kept
    assert again("a", {"n": 1, "b": [2, 3]}, 1.0, counted) == kept
    assert counted.calls == 1
    provenance = again.found["a"]["provenance"]
    assert provenance["commit"] == "abc" and provenance["seed"] == 3 and "date" in provenance
    results(fresh=True)("a", {"n": 1, "b": [2, 3]}, 1.0, counted)
    assert counted.calls == 2


@pytest.mark.parametrize(
    ("name", "inputs", "changes"),
    [
        ("a", {"n": 2}, {}),
        ("b", {"n": 1}, {}),
        ("a", {"n": 1}, {"machine": {"processor": "x", "cores": 4}}),
        ("a", {"n": 1}, {"versions": {"jax": "3"}}),
    ],
)
def test_what_it_depends_on_measures_it_again(results, counted, name, inputs, changes):
    results()("a", {"n": 1}, 1.0, counted)
    assert results(**changes).kept(name, inputs) is None
    results(**changes)(name, inputs, 1.0, counted)
    assert counted.calls == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"n": 1', '"n": 2'),
        lambda text: text.replace('"result"', '"other"'),
    ],
)
def test_a_damaged_file_is_not_used(results, counted, damage):
    first = results()
    first("a", {"n": 1}, 1.0, counted)
    (path,) = first.directory.iterdir()
    path.write_text(damage(path.read_text()))
    results()("a", {"n": 1}, 1.0, counted)
    assert counted.calls == 2
    assert json.loads(path.read_text())["depends_on"]["inputs"] == {"n": 1}


def test_a_plan_measures_nothing_and_notes_what_is_missing(results, counted):
    results()("a", {}, 5.0, counted)
    plan = results(before=None)
    assert plan("a", {}, 5.0, counted) and plan("b", {}, 7.0, counted) is None
    assert (plan.missing, counted.calls) == ({"b": 7.0}, 1)


def test_a_failure_is_noted_and_not_tried_again(results):
    def fail():
        failures.append(1)
        raise KeyError("gone")

    failures, run = [], results()
    assert run("a", {}, 1.0, fail) is run("a", {}, 1.0, fail) is None
    assert (run.failed, len(failures)) == ({"a": "KeyError: 'gone'"}, 1)
    # What JSON cannot hold is one.
    run("b", {}, 1.0, lambda: {1, 2})
    assert "not JSON serializable" in run.failed["b"]
    assert one_line(InputError("x is 3:\ngive 4")) == "x is 3: give 4"


def test_what_a_killed_run_was_writing_is_removed(results, counted):
    run = results()
    run("a", {}, 1.0, counted)
    unfinished = run.directory / ".half.json.12345678.writing"
    unfinished.write_text("{")
    run.tidy()
    assert not unfinished.exists() and results().kept("a", {})
