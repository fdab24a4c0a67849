"""What is kept under which name, and what is not trusted."""

from unittest.mock import Mock

import pytest

from spec_t5x.errors import InputError
from spec_t5x.labs.reproduction import kept_results
from spec_t5x.labs.reproduction.kept_results import Results, one_line

MACHINE = {"processor": "x", "threads": 2, "jax": "2", "spec_t5x": "1"}


@pytest.fixture
def measure():
    return Mock(return_value={"rows": [(1, 0.5, None)], "tokens": 7})


@pytest.fixture
def results(tmp_path):
    """``results(**changes)``: as a new run has them."""

    def make(machine=MACHINE, **changes):
        origin = {"machine": machine, "commit": "abc", "seed": 3}
        changes = {"before": lambda name, seconds: None} | changes
        return Results(tmp_path / "cache", origin, **changes)

    return make


def test_a_result_is_measured_once_and_kept_with_its_provenance(results, measure, monkeypatch):
    monkeypatch.setattr(kept_results, "OtherPrograms", lambda: Mock(share=0.45))
    first = results()
    kept = {"rows": [[1, 0.5, None]], "tokens": 7}
    # As a file gives it back.
    assert first("a", {"b": (2, 3), "n": 1}, 1.0, measure) == kept
    assert first("a", {"b": (2, 3), "n": 1}, 1.0, measure) == kept
    again = results(MACHINE | {"spec_t5x": "2"})
    assert again.kept("a", {"n": 1, "b": [2, 3]}) == kept
    assert again("a", {"n": 1, "b": [2, 3]}, 1.0, measure) == kept
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
def test_what_it_depends_on_measures_it_again(results, measure, name, inputs, machine):
    results()("a", {"n": 1}, 1.0, measure)
    assert results(machine).kept(name, inputs) is None
    results(machine)(name, inputs, 1.0, measure)
    assert measure.call_count == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"n": 1', '"n": 2'),
        lambda text: text.replace('"result"', '"other"'),
    ],
)
def test_a_damaged_file_is_not_used(results, measure, damage, tmp_path):
    results()("a", {"n": 1}, 1.0, measure)
    (path,) = (tmp_path / "cache").iterdir()
    path.write_text(damage(path.read_text()))
    results()("a", {"n": 1}, 1.0, measure)
    assert measure.call_count == 2
    assert results().kept("a", {"n": 1}) == {"rows": [[1, 0.5, None]], "tokens": 7}


def test_a_plan_measures_nothing_and_notes_what_is_missing(results, measure):
    results()("a", {}, 5.0, measure)
    plan = results(before=None)
    assert plan("a", {}, 5.0, measure) and plan("b", {}, 7.0, measure) is None
    assert (plan.missing, measure.call_count) == ({"b": 7.0}, 1)


def test_a_failure_is_noted_and_not_tried_again(results):
    fail, run = Mock(side_effect=KeyError("gone")), results()
    assert run("a", {}, 1.0, fail) is run("a", {}, 1.0, fail) is None
    assert (run.failed, fail.call_count) == ({"a": "KeyError: 'gone'"}, 1)
    # What JSON cannot hold is one.
    run("b", {}, 1.0, lambda: {1, 2})
    assert "not JSON serializable" in run.failed["b"]
    assert one_line(InputError("x is 3:\ngive 4")) == "x is 3: give 4"


def test_what_cannot_be_kept_ends_the_run(results, measure, tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(OSError, match="cannot be written"):
        results()("a", {}, 1.0, measure)
