"""Timing in turn, with a clock that the programs turn themselves."""

import pytest

from spec_t5x.tuning.interleaving import Program, compiled, interleaved


class Machine:
    """Programs that take a known time, the first time longer."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def clock(self) -> float:
        return self.now

    def program(self, name: str, seconds: float, before=0.0, compiling=0.0, **kwargs) -> Program:
        ran = []

        def run(calls):
            self.now += before + calls * seconds + (0.0 if ran else compiling)
            ran.append(calls)
            self.log.append((name, calls))
            return ()

        return Program(run=run, **kwargs)


def test_programs_take_turns_and_only_calls_count():
    machine = Machine()
    programs = [
        machine.program("a", 2.0, before=5.0, calls=3),
        machine.program("b", 1.0, before=5.0, calls=1, whole=True),
    ]
    rounds = interleaved(programs, 2, machine.clock)
    assert rounds.tolist() == [[2.0, 6.0], [2.0, 6.0]]
    # In turn; what does not count as a whole first without any call.
    of_a_round = [("a", 0), ("a", 3), ("b", 1)]
    assert machine.log == [*of_a_round, *of_a_round]


def test_compiling_is_counted_apart_and_calls_are_made_enough():
    machine = Machine()
    programs = [machine.program("a", 0.004, compiling=3.0), machine.program("b", 9.0, compiling=2)]
    ready, seconds = compiled(programs, machine.clock)
    assert seconds == pytest.approx(5.0)
    assert [program.calls for program in ready] == [10, 1]
    # A few microseconds drown in what a single timing costs.
    small = machine.program("d", 4e-6, before=1.0)
    assert compiled([small], machine.clock)[0][0].calls == 10_000
    nothing = machine.program("e", 0.0)
    assert compiled([nothing], machine.clock)[0][0].calls == 2**14
    given = machine.program("c", 0.001, calls=2)
    assert compiled([given], machine.clock)[0][0].calls == 2
