"""Costs of an iteration, from given timings."""

import itertools
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.loops.decode_state import Loop
from spec_t5x.loops.pace import Costs
from spec_t5x.sampling.distributions import sampling
from spec_t5x.tuning import costs as costs_lib
from spec_t5x.tuning.store import Store
from spec_t5x.tuning.timed_calls import Timed
from spec_t5x.verifiers import verifier
from tests.toy_t5 import tiny_t5

# Other tests replace them (``conftest.known_costs``).
measure, remembered = costs_lib.measure, costs_lib.remembered
LIMITS = (1, 4, 8)


def test_costs_by_hand():
    """A plain step takes 2 s, the prefill 3 s, an iteration 3 s and half a second a draft."""
    costs = costs_lib.of_times(LIMITS, np.asarray([[2.0, 3.0, 3.5, 5.0, 7.0]] * 5))
    np.testing.assert_allclose(costs.iteration, [1.5, *(1.5 + 0.25 * n for n in range(1, 9))])
    assert costs.prefill == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("rounds", "of_four", "expected"),
    [(4, 5.0, [1 + 1.5 / 4, 2.5]), (4, 2.0, [1 + 2.5 / 8, 1 + 2.5 / 2]), (5, 5.0, [1.0, 2.5])],
)
def test_few_timings_make_no_first_draft_cheaper_than_later_ones(rounds, of_four, expected):
    """Timed by chance as one that costs nothing, it would be asked for again and again."""
    costs = costs_lib.of_times(LIMITS, np.asarray([[2.0, 0.0, 2.0, of_four, 7.0]] * rounds))
    np.testing.assert_allclose(costs.iteration[1:5:3], expected)


def test_a_slow_spell_or_an_interrupted_timing_changes_no_costs():
    times = np.asarray([[2.0, 3.0, 3.5, 5.0, 7.0]] * 6) * np.asarray([[1, 1, 3, 3, 1, 1]]).T
    interrupted = times.copy()
    interrupted[1, 2] *= 9
    interrupted[4, 3] /= 9
    expected = costs_lib.of_times(LIMITS, times[:1].repeat(5, axis=0))
    assert costs_lib.of_times(LIMITS, interrupted) == expected


def test_noise_makes_no_longer_proposal_cheaper():
    costs = costs_lib.of_times([1, 3, 5], np.asarray([[2.0, 0.0, 5.0, 3.0, 7.0]] * 5))
    np.testing.assert_allclose(costs.iteration, [2.5, 2.5, 2.5, 2.5, 3.0, 3.5])
    # Nor an empty one than a plain step.
    costs = costs_lib.of_times([1, 3], np.asarray([[2.0, 0.0, 2.2, 9.0]] * 5))
    np.testing.assert_allclose(costs.iteration, [1.0, 1.1, 2.8, 4.5])


def test_a_tree_is_measured_whole():
    costs = costs_lib.of_times([3], np.asarray([[2.0, 0.0, 5.0]]), whole=True)
    np.testing.assert_allclose(costs.iteration, [1.0, math.inf, math.inf, 2.5])


@pytest.mark.parametrize(
    ("make", "name"), [(None, "coupled"), (CopyDraft, "block"), (None, "tree")]
)
def test_what_is_timed_is_what_decodes(monkeypatch, make, name):
    """Each program runs, so often as it is asked to, with as many drafts as its limit says."""
    target, choice = tiny_t5(0), verifier(name, widths=(2, 1) if name == "tree" else ())
    draft = TransformerDraft(tiny_t5(1)) if make is None else make(target.vocab_size)
    proposed = []

    def interleaved(programs, rounds, *, budget):
        plain, prefill, *iterations = programs
        assert prefill(2) is not None
        for run, calls in ((plain, 2), *((run, 3) for run in iterations)):
            state = run(calls)
            assert (state.stats.target_calls == calls).all()
            proposed.append(state.stats.proposed.tolist())
            # Each call is from the same lengths, and its first token is the last one of the next.
            lengths, sequences = state.outputs.lengths, state.outputs.sequences
            np.testing.assert_array_equal(state.target_cache.lengths, lengths)
            np.testing.assert_array_equal(lengths, 8)
            np.testing.assert_array_equal(sequences[:, 8], sequences[:, 9])
        return np.asarray([[2.0, 1.0, *range(3, 3 + len(iterations))]])

    monkeypatch.setattr(costs_lib, "interleaved", interleaved)
    inputs = jnp.ones((2, 5), jnp.int32)
    loop = Loop(gamma=3, max_decode_len=16, num_decodes=2, verifier=choice)
    costs, steady = measure(target, draft, inputs, sampling(1.0), loop)
    assert steady and costs.largest == 3 and costs.prefill == 0.5
    if name == "tree":
        assert proposed[0] == [0] * 4 and len(proposed) == 2 and min(proposed[1]) > 0
    else:
        assert proposed == [[0] * 4, [3] * 4, [9] * 4]


def test_a_draft_without_trees_is_refused_before_anything_is_timed():
    target = tiny_t5(0)
    loop = Loop(gamma=2, max_decode_len=16, verifier=verifier("tree", widths=(2, 1)))
    with pytest.raises(InputError, match="CopyDraft has no propose_tree"):
        measure(target, CopyDraft(30), jnp.ones((1, 5), jnp.int32), sampling(0.0), loop)


def test_what_was_measured_is_measured_once(tmp_path, caplog, monkeypatch):
    calls, steady, clock = [], True, map(float, itertools.count())
    monkeypatch.setattr(costs_lib, "time", types.SimpleNamespace(perf_counter=clock.__next__))

    def measured():
        calls.append(0)
        return Costs(iteration=(1.0, 1.5)), steady

    caplog.set_level("INFO")
    for _ in range(2):
        found = remembered({"a": 1}, measured, Store(tmp_path / "costs"))
        assert found.iteration == (1.0, 1.5)
    assert len(calls) == 1
    assert "measured the costs of speculation in 1.0 s, and stored them" in caplog.text
    (tmp_path / "file").touch()
    remembered({"a": 1}, measured, Store(tmp_path / "file"))
    assert "but cannot store them" in caplog.text
    # Costs that may be wrong are used in this process alone.
    steady = False
    for _ in range(2):
        remembered({"b": 1}, measured, Store(tmp_path / "costs"))
    assert len(calls) == 4
    assert "but do not store them: the timings vary widely" in caplog.text


@pytest.mark.parametrize(
    ("plain", "prefill", "iteration", "expected"),
    [
        ([1.0, 1.1, 1.2, 1.1], [1.0, 9.0, 0.0, 3.0], [1.2, 1.5, 1.5, 1.2], True),
        ([1.0, 2.0, 1.0, 2.0], [1.0] * 4, [1.2, 2.4, 1.2, 2.4], False),
        ([1.0] * 4, [1.0] * 4, [1.2, 1.2, 6.0, 6.0], False),
        # One of many, and one of two.
        ([1.0] * 9 + [7.0], [1.0] * 10, [1.2] * 10, True),
        ([1.0, 1.8], [1.0] * 2, [1.2, 2.1], False),
    ],
)
def test_timings_of_a_busy_machine_are_not_steady(monkeypatch, plain, prefill, iteration, expected):
    """Only the median of the prefill, which may take no time, counts."""
    times = np.stack([plain, prefill, iteration], axis=1)
    monkeypatch.setattr(costs_lib, "interleaved", lambda *_, **__: times)
    target = tiny_t5(0)
    given = target, CopyDraft(target.vocab_size), jnp.ones((1, 5), jnp.int32), sampling(0.0)
    assert measure(*given, Loop(gamma=1, max_decode_len=16))[1] == expected


def test_tokens_half_way_may_be_limited():
    target = tiny_t5(0)
    given = target, TransformerDraft(target), jnp.ones((1, 5), jnp.int32), sampling(0.0)
    for max_decode_len, limit, length in ((1, {}, 1), (40, {}, 20), (3000, {"most": 512}, 512)):
        timed = Timed.half_way(*given, Loop(gamma=1, max_decode_len=max_decode_len), **limit)
        np.testing.assert_array_equal(timed.state.outputs.lengths, [length])
        # The draft feeds the last token when it proposes.
        np.testing.assert_array_equal(timed.state.draft_state.lengths, [length - 1])
