"""The registry's entries by name."""

import pytest

from spec_t5x import registry
from spec_t5x.errors import InputError


@pytest.fixture
def kind(monkeypatch) -> str:
    """Registers a kind with two entries."""
    monkeypatch.setitem(registry._PLACES, "fruit", {})
    registry.register("fruit", apple="math:pi", pear="no_such_module:x")
    return "fruit"


def test_a_thing_is_found_by_its_name_and_imported_then(kind):
    assert registry.names(kind) == ("apple", "pear")
    assert registry.find(kind, "apple") == pytest.approx(3.14159, abs=1e-5)
    with pytest.raises(ModuleNotFoundError):
        registry.find(kind, "pear")


def test_a_name_that_is_not_registered_lists_those_that_are(kind):
    with pytest.raises(InputError, match="no fruit is called 'fig': .* registered, apple, pear$"):
        registry.find(kind, "fig")
    assert registry.names("no such kind") == ()


def test_a_name_of_a_notebook_may_get_another_object(kind, monkeypatch):
    for value in (1.0, 2.0):
        monkeypatch.setattr("math.pi", value)
        assert registry.find(kind, "apple") == value


def test_a_name_is_given_once(kind):
    registry.register(kind, apple="math:pi")
    with pytest.raises(ValueError, match="fruit 'apple' is math:pi already, not math:e"):
        registry.register(kind, apple="math:e")
