"""Costs in files: what comes back, and what damage does."""

import concurrent.futures
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
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: text.replace("1.5", '"x"'),
        lambda text: text.replace("1.5", "-1.5"),
        lambda text: text.replace('"iteration"', '"iterations"'),
        lambda text: text.replace('"abc"', '"xyz"'),
        lambda text: text.replace('"format": 2', '"format": 1'),
    ],
)
def test_a_damaged_file_is_as_good_as_none_and_is_written_anew(store, damage):
    store.save(KEY, COSTS)
    path = file_of(store)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    assert store.load(KEY) is None
    store.save(KEY, COSTS)
    assert store.load(KEY) == COSTS


def test_bytes_that_are_no_text_are_as_good_as_none(store):
    store.save(KEY, COSTS)
    file_of(store).write_bytes(b"\xff\xfe\x00")
    assert store.load(KEY) is None


def test_where_nothing_can_be_written_it_is_said(tmp_path):
    (tmp_path / "file").touch()
    trouble = Store(tmp_path / "file" / "costs").save(KEY, COSTS)
    assert "not remembered" in trouble and "cannot be written" in trouble


def test_the_users_store_is_beside_the_compiled_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Store.of_user().directory == tmp_path / "spec_t5x" / "costs"


def test_of_two_writers_one_is_whole_at_any_moment(store):
    """As of two processes: each writes a file of its own, which then takes the name."""
    findings = [dataclasses.replace(COSTS, prefill=prefill) for prefill in (1.0, 2.0)]
    for finding in findings:
        store.save(KEY, finding)

    def write(finding):
        for _ in range(100):
            assert store.save(KEY, finding) is None

    with concurrent.futures.ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, finding) for finding in findings]
        while not all(writer.done() for writer in writers):
            assert store.load(KEY) in findings
    for writer in writers:
        writer.result()
    assert file_of(store).suffix == ".json"
