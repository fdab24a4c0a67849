"""The registry's entries by name."""

import pytest

from spec_t5x import registry
from spec_t5x.errors import InputError


@pytest.fixture
def kind(monkeypatch) -> str:
    """Registers a kind with two entries."""
    monkeypatch.setitem(registry._PLACES, "fruit", {})
    places = {"pear": "no_such_module:x", "plum": "math:no_such_object"}
    registry.register("fruit", apple="math:pi", **places)
    return "fruit"


def test_a_thing_is_found_by_its_name_and_imported_then(kind):
    assert registry.names(kind) == ("apple", "pear", "plum")
    assert registry.find(kind, "apple") == pytest.approx(3.14159, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pear", r"'pear' is registered as no_such_module:x \(No module named 'no_such_module'\)"),
        ("plum", r"'plum' is registered as math:no_such_object \(.* 'no_such_object'\): give its"),
    ],
)
def test_an_address_of_nothing_is_named(kind, name, message):
    with pytest.raises(InputError, match=f"^fruit {message}"):
        registry.find(kind, name)
    with pytest.raises(InputError, match="^fruit 'pear' is registered"):
        registry.find_all(kind)


def test_a_name_that_is_not_registered_lists_those_that_are(kind):
    with pytest.raises(
        InputError, match="no fruit is called 'fig': .* registered, apple, pear, plum$"
    ):
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


def test_a_kind_that_nothing_looks_up_is_refused():
    with pytest.raises(InputError, match="kind is 'drafts': choose one of family, draft, verifier"):
        registry.register("drafts", parrot="mypkg.parrot:KIND")
