"""Timing in turn, with a clock that the programs turn themselves."""

import types

import pytest

from spec_t5x.tuning import interleaving
from spec_t5x.tuning.interleaving import interleaved


class Machine:
    """Programs that take a known time, the first time with a call longer."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def program(self, name: str, seconds: float, before=0.0):
        def run(calls):
            # A draft's prefill that is not called compiles nothing.
            is_compiled = any(count for each, count in self.log if each == name)
            compiling = 3.0 if calls and not is_compiled else 0.0
            self.now += before + calls * seconds + compiling
            self.log.append((name, calls))
            return ()

        return run


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    clock = types.SimpleNamespace(perf_counter=lambda: machine.now)
    monkeypatch.setattr(interleaving, "time", clock)
    return machine


def test_programs_take_turns_and_only_calls_count(machine):
    programs = [machine.program("a", 0.004, before=5.0), machine.program("b", 1.0)]
    rounds = interleaved(programs, 2)
    assert rounds.round(9).tolist() == [[0.004, 1.0], [0.004, 1.0]]
    # In turn, each first without any call: that time does not count.
    of_a_round = [("a", 0), ("a", 10), ("b", 0), ("b", 1)]
    assert machine.log[-8:] == [*of_a_round, *of_a_round]
    # A round takes 11 seconds; two are made in any case.
    for budget, made in ((0.0, 2), (30.0, 3), (90.0, 5)):
        assert len(interleaved(programs, 5, budget=budget)) == made


def test_calls_are_made_enough(machine):
    # A few microseconds drown in what a single timing costs; and what takes no time ends, too.
    programs = [machine.program("a", 4e-6, before=1.0), machine.program("b", 0.0)]
    # Times are divided by one another.
    assert (interleaved(programs, 1) > 0).all()
    assert dict(machine.log) == {"a": 10_000, "b": 2**14}


def test_an_interruption_leaves_timings_as_long(machine):
    steady = machine.program("a", 0.001)

    def interrupted(calls):
        # Of the runs with calls, the first compiles and the second waits for another process.
        waits = len([each for each in machine.log if each[1]]) == 1 and calls
        machine.now += 0.05 if waits else 0.0
        return steady(calls)

    interleaved([interrupted], 1)
    assert dict(machine.log) == {"a": 40}
