"""Times of calls, from made-up timings: which calls are timed, and in which unit."""

import numpy as np
import pytest

from spec_t5x.labs.benchmark import iteration_parts, step_times
from spec_t5x.labs.benchmark.iteration_parts import measure_parts
from spec_t5x.labs.benchmark.step_times import StepTimes, measure_step_times
from spec_t5x.loops.decode_state import Loop
from spec_t5x.tuning.timed_calls import Timed
from spec_t5x.verifiers import TreeVerifier

pytestmark = pytest.mark.usefixtures("unchecked_module")

GAMMA = 4


class _Timed:
    """State of a loop that runs nothing."""

    def iterations(self, *gamma):
        return "iterations", *gamma


@pytest.fixture
def seconds(monkeypatch):
    """Provides seconds by program, to be filled; replaces programs by their names."""
    found = {}
    for module in (step_times, iteration_parts):
        monkeypatch.setattr(module, "target_calls", lambda _, new: ("target", new))
        monkeypatch.setattr(module, "proposals", lambda _, scored=False: ("drafts", scored))
        # The last round is an outlier.
        monkeypatch.setattr(
            module,
            "interleaved",
            lambda programs, repeats: np.outer(
                [*[1.0] * (repeats - 1), 50.0], [found[program] for program in programs]
            ),
        )
    monkeypatch.setattr(Timed, "half_way", lambda *_: _Timed())
    return found


@pytest.mark.parametrize(("verifier", "nodes"), [(None, GAMMA + 1), (TreeVerifier((2, 1)), 5)])
def test_steps_are_milliseconds_of_a_draft_a_call_and_a_verification(seconds, verifier, nodes):
    seconds |= {("target", 1): 0.004, ("drafts", False): 0.006, ("target", nodes): 0.005}
    gamma = GAMMA if verifier is None else 2
    options = {} if verifier is None else {"verifier": verifier}
    found = measure_step_times(
        None, None, None, gamma=gamma, max_decode_len=9, settings=None, **options
    )
    assert vars(found) == pytest.approx({"target": 4.0, "draft": 6.0 / gamma, "verification": 5.0})
    assert (found.c, found.verification_cost) == pytest.approx((1.5 / gamma, 1.25))


def test_a_batch_ends_with_its_slowest_row():
    times = StepTimes(target=2.0, draft=0.5, verification=3.0)
    # Two tokens of two rows at gamma 1 and alpha 1/2 take 1.75 iterations on average.
    expected = 2 / (1.75 * (0.25 + 1.5))
    assert times.batch_speed_up(0.5, 1, rows=2, length=2) == pytest.approx(expected)


def test_parts_are_milliseconds_of_each_program_in_each_round(seconds):
    programs = {
        "iteration": ("iterations",),
        "networks": ("drafts", True),
        "proposal": ("drafts", False),
        "verification": ("target", GAMMA + 1),
        "plain_step": ("iterations", 0),
        "target_call": ("target", 1),
    }
    seconds |= {program: number / 1e3 for number, program in enumerate(programs.values(), start=1)}
    loop = Loop(gamma=GAMMA, max_decode_len=9)
    parts = measure_parts(None, None, None, None, loop, repeats=3)
    assert parts.keys() == programs.keys()
    for number, times in enumerate(parts.values(), start=1):
        assert times == pytest.approx([number, number, 50 * number])
