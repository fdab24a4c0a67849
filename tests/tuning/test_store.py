"""Costs in files: what comes back, and what damage does."""

import dataclasses
from pathlib import Path

import pytest

from spec_t5x.loops.pace import Costs
from spec_t5x.tuning.store import Store

COSTS = Costs(iteration=(1.0, 1.5, 2.0), prefill=0.5)
KEY = {"target": "abc", "settings": {"temperature": 0.0, "widths": (3, 2)}}


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "cache" / "costs")


def file_of(store: Store) -> Path:
    (path,) = store.directory.iterdir()
    return path


def load(store: Store, key=KEY) -> Costs | None:
    return store.load(key, Costs.parse)


def save(store: Store, costs: Costs = COSTS) -> str | None:
    return store.save(KEY, dataclasses.asdict(costs))


def test_what_was_saved_comes_back_for_its_key_alone(store):
    assert load(store) is None
    assert save(store) is None
    assert load(store) == COSTS
    assert load(store, {**KEY, "target": "abd"}) is None
    better = dataclasses.replace(COSTS, prefill=0.7)
    save(store, better)
    assert load(store) == better
    # Nothing but it is left behind.
    assert file_of(store).suffix == ".json"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("1.5", '"x"'),
        lambda text: text.replace('"iteration"', '"iterations"'),
        lambda text: text.replace('"abc"', '"xyz"'),
        lambda text: text.replace('"format": ', '"format": 9'),
    ],
)
def test_a_damaged_file_is_as_good_as_none_and_is_written_again(store, damage):
    save(store)
    path = file_of(store)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    assert load(store) is None
    save(store)
    assert load(store) == COSTS


def test_where_nothing_can_be_written_it_is_said(tmp_path):
    (tmp_path / "file").touch()
    trouble = save(Store(tmp_path / "file" / "costs"))
    assert "cannot store them" in trouble and "cannot be written" in trouble
