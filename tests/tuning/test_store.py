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


def test_what_was_saved_comes_back_for_its_key_alone(store):
    assert store.load(KEY) is None
    assert store.save(KEY, COSTS) is None
    assert store.load(KEY) == COSTS
    assert store.load({**KEY, "target": "abd"}) is None
    better = dataclasses.replace(COSTS, prefill=0.7)
    store.save(KEY, better)
    assert store.load(KEY) == better
    # Nothing but it is left behind.
    assert file_of(store).suffix == ".json"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("1.5", '"x"'),
        lambda text: text.replace('"iteration"', '"iterations"'),
        lambda text: text.replace('"abc"', '"xyz"'),
        lambda text: text.replace('"format": 3', '"format": 2'),
    ],
)
def test_a_damaged_file_is_as_good_as_none_and_is_written_again(store, damage):
    store.save(KEY, COSTS)
    path = file_of(store)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    assert store.load(KEY) is None
    store.save(KEY, COSTS)
    assert store.load(KEY) == COSTS


def test_where_nothing_can_be_written_it_is_said(tmp_path):
    (tmp_path / "file").touch()
    trouble = Store(tmp_path / "file" / "costs").save(KEY, COSTS)
    assert "not remembered" in trouble and "cannot be written" in trouble
