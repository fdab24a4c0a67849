"""Programs are found again without a trace, and only where they are the same."""

import os

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from spec_t5x.loops.pace import Costs, Pace
from spec_t5x.machine import programs

traces = []


def add(pair, *, times):
    """Says that it was traced."""
    traces.append(times)
    return {"sum": times * (pair[0] + pair[1])}


@pytest.fixture
def directory(tmp_path):
    """JAX's cache of compiled programs lies here."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    traces.clear()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def add_in_a_new_process(pair, times=2):
    """As by a process that has made no program yet."""
    return programs.Kept(add, ("times",))(pair, times=times)["sum"]


def kept(directory):
    return sorted((directory / "whole").glob("*"))


PAIR = (np.arange(3.0, dtype=np.float32), np.float32(1))


def test_a_later_process_traces_nothing(directory):
    first, second = add_in_a_new_process(PAIR), add_in_a_new_process(PAIR)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, [2.0, 4.0, 6.0])
    assert traces == [2]
    assert len(kept(directory)) == 1


@flax.struct.dataclass
class Many:
    """A structure of so many leaves that it is remembered."""

    leaves: tuple

    def __getitem__(self, item):
        return self.leaves[item]


def test_a_large_argument_is_looked_through_once_while_it_lives(directory, monkeypatch):
    monkeypatch.setattr(programs, "_KNOWN", (*programs._KNOWN, "tests"))
    kept_add, looked = programs.Kept(add, ("times",)), []
    typeof = jax.typeof
    monkeypatch.setattr(jax, "typeof", lambda leaf: looked.append(leaf) or typeof(leaf))

    def many(first):
        return Many(tuple(np.float32(first + n) for n in range(40)))

    one = many(1)
    assert kept_add(one, times=2)["sum"] == 6
    del looked[:]
    assert kept_add(one, times=2)["sum"] == 6 and not looked
    # Another of its kind has the same program, and its own numbers.
    other = many(5)
    assert kept_add(other, times=2)["sum"] == 22 and looked
    assert kept_add(one, times=2)["sum"] == 6
    assert traces == [2]
    del one, other
    assert not any(isinstance(ref(), Many) for ref, _ in programs._seen.values())


@pytest.mark.parametrize(
    ("pair", "times"),
    [
        (PAIR, 3),
        ((PAIR[0][:2], PAIR[1]), 2),
        ((PAIR[0].astype(np.int32), PAIR[1]), 2),
        (list(PAIR), 2),
    ],
)
def test_what_differs_has_a_program_of_its_own(directory, pair, times):
    add_in_a_new_process(PAIR)
    result = add_in_a_new_process(pair, times)
    np.testing.assert_array_equal(result, times * (pair[0] + pair[1]))
    assert len(traces) == len(kept(directory)) == 2


def test_other_source_or_settings_have_programs_of_their_own(directory, monkeypatch):
    add_in_a_new_process(PAIR)
    before = programs._surroundings()
    monkeypatch.setattr(programs, "_TRACED", ("types.py",))
    programs.source.cache_clear()
    programs._surroundings.cache_clear()
    assert programs._surroundings() != before
    add_in_a_new_process(PAIR)
    monkeypatch.undo()
    programs.source.cache_clear()
    programs._surroundings.cache_clear()
    assert len(traces) == 2


def test_a_damaged_program_is_made_again(directory):
    add_in_a_new_process(PAIR)
    (path,) = kept(directory)
    path.write_bytes(path.read_bytes()[:100])
    np.testing.assert_array_equal(add_in_a_new_process(PAIR), [2.0, 4.0, 6.0])
    assert len(traces) == 2
    add_in_a_new_process(PAIR)
    assert len(traces) == 2


def test_what_jaxs_own_cache_held_is_not_kept(directory, monkeypatch):
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_compiled", lambda lowered: (lowered.compile(), False))
        add_in_a_new_process(PAIR)
    jax.config.update(name, before)
    np.testing.assert_array_equal(add_in_a_new_process(PAIR), [2.0, 4.0, 6.0])
    assert kept(directory) == []


@flax.struct.dataclass
class Foreign:
    """A class whose source is not the package's."""

    value: jax.Array


def test_classes_of_others_are_not_kept(directory):
    @jax.jit
    def double(foreign):
        return 2 * foreign.value

    assert programs.Kept(double, ())(Foreign(value=jnp.ones(()))) == 2
    assert kept(directory) == []


def test_within_a_trace_the_function_is_part_of_it(directory):
    call = programs.Kept(add, ("times",))
    assert jax.jit(lambda x: call((x, x), times=3)["sum"])(1.0) == 6
    assert kept(directory) == []


def test_without_a_cache_nothing_is_kept(tmp_path):
    assert jax.config.jax_compilation_cache_dir == ""
    traces.clear()
    add_in_a_new_process(PAIR)
    add_in_a_new_process(PAIR)
    assert traces == [2, 2]


def test_the_programs_that_were_not_used_for_longest_go(directory, monkeypatch):
    for times in (1, 2):
        add_in_a_new_process(PAIR, times)
    sizes = [path.stat().st_size for path in kept(directory)]
    for path in kept(directory):
        # A clock of files ticks every few milliseconds.
        os.utime(path, (1, 1))
    # Room for two: they differ by some bytes.
    monkeypatch.setattr(programs, "MAX_SIZE", 5 * max(sizes) // 2)
    # The first is used once more, so that the second goes.
    add_in_a_new_process(PAIR, 1)
    add_in_a_new_process(PAIR, 3)
    assert len(kept(directory)) == 2
    traces.clear()
    add_in_a_new_process(PAIR, 1)
    assert traces == []


def test_a_pace_is_a_class_of_the_package(directory, unchecked):
    # Of a size that no other test has made a program for.
    paces = [Pace.start(Costs.by_formula(c=0.1, largest=7)) for _ in range(2)]
    limit = programs.Kept(jax.jit(Pace.limit), ())
    first, second = (int(limit(pace)) for pace in paces)
    assert len(kept(directory)) == 1
    assert first == second > 0
