"""What is kept under which name, and what is not trusted."""

import json

import pytest

from spec_t5x.experiments.reproduction.cache import Cache, UnusableError, as_json
from spec_t5x.experiments.reproduction.items import Done, Part

MACHINE = {"processor": "x", "cores": 2}
DONE = Done(result={"rows": [[1, 0.5, None]], "tokens": 7}, provenance={"seed": 3})


def part(name="p", **inputs):
    return Part(name=name, inputs=inputs, seconds=1.0, compute=lambda report: None)


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache", MACHINE)


def test_what_is_stored_is_loaded(cache):
    assert cache.load(part(n=1)) is None
    cache.store(part(n=1), DONE)
    assert cache.load(part(n=1)) == DONE
    assert Cache(cache.directory, dict(MACHINE)).load(part(n=1)) == DONE


@pytest.mark.parametrize(
    "other",
    [part(n=2), part(n=1, m=None), part("q", n=1), part(n="1"), part(n=[1])],
    ids=["value", "more", "name", "type", "list"],
)
def test_other_inputs_are_another_file(cache, other):
    cache.store(part(n=1), DONE)
    assert cache.path(other) != cache.path(part(n=1))
    assert cache.load(other) is None


def test_another_machine_measures_again(cache):
    cache.store(part(), DONE)
    assert Cache(cache.directory, MACHINE | {"cores": 4}).load(part()) is None


def test_the_order_of_inputs_and_tuples_do_not_matter(cache):
    ordered = part(a=1, b=(2, 3))
    assert cache.path(ordered) == cache.path(part(b=[2, 3], a=1))
    cache.store(ordered, DONE)
    assert cache.load(part(b=[2, 3], a=1)) == DONE


def edited(change):
    def apply(text):
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return apply


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: "\x00" * len(text), "cannot be read"),
        (lambda text: "[1, 2]", "is of something else"),
        (edited(lambda c: c["identity"]["inputs"].update(n=2)), "is of something else"),
        (edited(lambda c: c["identity"].update(version=0)), "is of something else"),
        (edited(lambda c: c["result"].update(tokens=8)), "was changed"),
        (edited(lambda c: c["provenance"].update(seed=4)), "was changed"),
        (edited(lambda c: c.pop("sum")), "was changed"),
    ],
)
def test_a_damaged_file_is_not_used(cache, damage, reason):
    cache.store(part(n=1), DONE)
    path = cache.path(part(n=1))
    path.write_text(damage(path.read_text()))
    with pytest.raises(UnusableError, match=f"{path.name} {reason}"):
        cache.load(part(n=1))
    cache.store(part(n=1), DONE)
    assert cache.load(part(n=1)) == DONE


def test_what_a_killed_run_was_writing_is_removed(cache):
    cache.store(part(), DONE)
    unfinished = cache.directory / ".half.json.12345678.writing"
    unfinished.write_text("{")
    cache.tidy()
    assert not unfinished.exists()
    assert cache.load(part()) == DONE


def test_what_json_cannot_hold_is_refused():
    assert as_json({"a": (1, 2), 3: None}) == {"a": [1, 2], "3": None}
    with pytest.raises(TypeError):
        as_json({"a": {1, 2}})
