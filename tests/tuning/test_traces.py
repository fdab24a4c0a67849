"""How a text came about, and what another gamma would have done: checked by running it."""

import dataclasses

import jax
import numpy as np
import pytest

from spec_t5x.decoding import Iteration
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.theory import conditional_acceptance
from spec_t5x.tuning.traces import ENDED, Row, Trace, groups_of, measure_trace

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXTS = ["My sister", "Wir gehen morgen.", "Der alte Tisch", "a green bird", "It is wet."]
OPTIONS = GenerateOptions(max_decode_len=24, batch_size=5)
LARGEST = 5


def row(accepted: str, proposed=None) -> Row:
    """``1`` for an accepted draft, ``0`` for a refused one, ``.`` where it had no turn."""
    flags = [{"1": 1.0, "0": 0.0, ".": np.nan}[flag] for flag in accepted]
    ahead = [9] * len(flags) if proposed is None else proposed
    return Row(accepted=np.asarray(flags), proposed=np.asarray(ahead))


def of(*rows: str, gamma=3) -> Trace:
    return Trace(rows=[[row(flags)] for flags in rows], gamma=gamma)


@pytest.fixture(scope="module")
def generator(tiny_pair) -> Generator:
    return Generator.load(tiny_pair / "target", tiny_pair / "draft")


@pytest.fixture(scope="module")
def trace(generator, quick_compilation) -> Trace:
    return measure_trace(generator, generator.batches(TEXTS, OPTIONS), OPTIONS, LARGEST)


# --- worked by hand ----------------------------------------------------------


def test_iterations_of_a_row_by_hand():
    """1 1 0 1 1 1 1 0: with gamma 2 the tokens come as 3, 3, 2, with gamma 3 as 3, 4, 1."""
    flags = row("11011110")
    known = flags.accepted == 1
    assert flags.iterations(1, known).tolist() == [[1, 2], [1, 1], [1, 2], [1, 2], [1, 1]]
    assert flags.iterations(2, known).tolist() == [[2, 3], [2, 3], [2, 2]]
    assert flags.iterations(3, known).tolist() == [[3, 3], [3, 4], [3, 1]]


def test_a_draft_that_proposes_less_is_asked_again_sooner():
    """Two tokens were proposed, then none: the third comes from the target."""
    flags = row("11.0", proposed=[2, 1, 0, 1])
    known = np.asarray([True, True, True, False])
    assert flags.iterations(3, known).tolist() == [[2, 3], [1, 1]]
    assert flags.iterations(1, known).tolist() == [[1, 2], [0, 1], [1, 1]]


def test_a_batch_lasts_as_long_as_its_last_row():
    counts = of("1111", "0000", "11").counts()
    groups = groups_of(3, 2)
    assert groups.tolist() == [[0, 1], [2, -1]]
    longest = counts.of_batches(3, groups)
    assert (longest != ENDED).sum(axis=-1).tolist() == [4, 1]
    assert counts.steps(groups).tolist() == [4, 2]
    assert counts.iterations(3).tolist() == [[1], [4], [1]]
    assert counts.advances(3).tolist() == [4, 1, 1, 1, 1, 2]


def test_rates_by_position_leave_out_what_the_end_of_the_text_hid():
    """Iterations 1 1 0, then 1 and the end: the second place was seen once."""
    trace = of("1101")
    np.testing.assert_allclose(trace.by_position(), [1.0, 1.0, 0.0])
    assert trace.rate == 0.5


def test_what_is_not_known_is_taken_to_be_as_good_as_its_neighbours():
    always, never = of("111.111.", "1111"), of("10.0.0.0", "1010")
    assert always.rate == 1.0 and never.rate == 0.0
    assert always.counts().iterations(1)[0, 0] == 4
    # Wrong everywhere but at the first place: nothing after it is filled in.
    assert never.counts().iterations(1)[0, 0] == 7


# --- against real runs -------------------------------------------------------


@pytest.mark.parametrize("gamma", [2, LARGEST])
def test_the_iterations_of_another_gamma_are_those_of_a_run_with_it(generator, trace, gamma):
    (batch,) = generator.batches(TEXTS, OPTIONS)
    options = dataclasses.replace(OPTIONS, gamma=gamma)
    decoded = jax.device_get(generator.decode(batch, options))
    calls = decoded.stats.target_calls
    simulated = trace.counts().iterations(gamma)
    # A row in which every place is known, and there must be some, is exact.
    known = [not np.isnan(group[0].accepted).any() for group in trace.rows]
    assert sum(known) >= 2
    np.testing.assert_array_equal(simulated[known], calls[known])
    if gamma == LARGEST:
        np.testing.assert_array_equal(simulated, calls)
    assert np.abs(simulated - calls).max() <= 2
    np.testing.assert_array_equal(trace.counts().lengths, decoded.lengths)


def test_rates_by_position_are_the_loops(generator, trace):
    (batch,) = generator.batches(TEXTS, OPTIONS)
    options = dataclasses.replace(OPTIONS, gamma=LARGEST)
    stats = jax.device_get(generator.decode(batch, options)).stats
    accepted = stats.accepted_by_position.sum(axis=(0, 1))
    verified = stats.verified_by_position.sum(axis=(0, 1))
    np.testing.assert_allclose(trace.by_position(), conditional_acceptance(accepted, verified))


def test_several_outputs_of_an_input_are_rows_of_it(generator, monkeypatch):
    """Rows as a loop has them: both outputs of an input, then those of the next; no padding."""
    options = dataclasses.replace(OPTIONS, num_decodes=2, batch_size=2)

    def iterations(self, batch, options):
        rows = np.asarray([1, 2, 3, 3])
        nothing = np.zeros((4, 3), np.int32)
        for turn in (1, 0):
            yield Iteration(
                proposed=nothing,
                num_proposed=np.full(4, 3, np.int32),
                num_accepted=(rows - 1) * turn,
                appended=np.zeros((4, 4), np.int32),
                num_appended=rows * turn + (1 - turn),
                ended=np.full(4, not turn),
            )

    monkeypatch.setattr(Generator, "iterations", iterations)
    trace = measure_trace(generator, generator.batches(TEXTS[:3], options), options, 3)
    flags = [[row.accepted.tolist() for row in group] for group in trace.rows]
    assert flags == [
        [[0, 0], [1, 0, 0]],
        [[1, 1, 0, 0], [1, 1, 0, 0]],
        [[0, 0], [1, 0, 0]],
    ]
    assert trace.counts().drafts.shape[:3] == (3, 3, 2)
    assert trace.num_tokens == trace.counts().lengths.sum() == 18
