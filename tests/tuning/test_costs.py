"""What an iteration costs, of timings that are given: by a clock that the decoding moves."""

import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.loops.pace import Costs
from spec_t5x.testing.toy_models import tiny_t5
from spec_t5x.tuning import costs as costs_lib
from spec_t5x.tuning.store import Store
from spec_t5x.verifiers import verifier

# The tests' own stands in its place elsewhere (``conftest.known_costs``).
measure, remembered = costs_lib.measure, costs_lib.remembered


class Machine:
    """A set-up takes 7, a plain step 2, the draft's prefill 3, an iteration as it is told."""

    def __init__(self, iteration, tokens_per_iteration=2):
        self.iteration, self.per_iteration = iteration, tokens_per_iteration
        self.now = 0.0

    def decode(self, pace, tokens):
        limit = int(pace.forced)
        steps = tokens if limit == 0 else -(-tokens // min(self.per_iteration, limit + 1))
        self.now += 7.0 + (2.0 * steps if limit == 0 else 3.0 + self.iteration(limit) * steps)
        counted = pace.replace(
            plain_steps=jnp.int32(steps if limit == 0 else 0),
            iterations=jnp.int32(steps if limit else 0),
        )
        return types.SimpleNamespace(pace=counted)

    def clock(self):
        return self.now


def test_costs_by_hand():
    machine = Machine(lambda limit: 3.0 + 0.5 * limit)
    costs = measure(machine.decode, 8, clock=machine.clock)
    np.testing.assert_allclose(costs.iteration, [1.5, *(1.5 + 0.25 * n for n in range(1, 9))])
    assert costs.prefill == pytest.approx(1.5)
    assert costs.step == pytest.approx(2.0)


def test_a_first_draft_is_not_cheaper_than_later_ones():
    """Timed as one that costs nothing, it would be asked for again and again."""
    machine = Machine(lambda limit: 2.0 if limit == 1 else 3.0 + 0.5 * limit)
    costs = measure(machine.decode, 8, clock=machine.clock)
    np.testing.assert_allclose(costs.iteration[1:5:3], [1 + 1.5 / 4, 2.5])


def test_a_tree_is_measured_whole():
    machine = Machine(lambda limit: 5.0)
    costs = measure(machine.decode, 3, whole=True, clock=machine.clock)
    np.testing.assert_allclose(costs.iteration, [1.0, math.inf, math.inf, 2.5])


def test_what_was_measured_is_measured_once(tmp_path, caplog):
    calls = []

    def measured():
        calls.append(0)
        return Costs(iteration=(1.0, 1.5))

    caplog.set_level("INFO")
    for _ in range(2):
        found = remembered({"a": 1}, measured, Store(tmp_path / "costs"))
        assert found.iteration == (1.0, 1.5)
    assert len(calls) == 1
    assert "measured in 0.0 s what speculation costs here, and will remember it" in caplog.text
    (tmp_path / "file").touch()
    remembered({"a": 1}, measured, Store(tmp_path / "file"))
    assert "which is not remembered" in caplog.text


def test_what_was_measured_beside_other_programs_is_measured_again_without_them(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    calls = []

    def others_use(share):
        others = types.SimpleNamespace(share=share)
        monkeypatch.setattr(costs_lib, "OtherPrograms", lambda: others)
        monkeypatch.setattr(costs_lib, "_since_import", others)

    def costs():
        def measured():
            calls.append(0)
            return Costs(iteration=(1.0, 1.5))

        return remembered({"a": 1}, measured, Store(tmp_path))

    others_use(0.5)
    assert costs().beside == costs().beside == 0.5
    # Timed as busy as it is now: that is what it costs.
    assert len(calls) == 1 and "while other programs are as busy" in caplog.text
    assert "costs here while other programs used 50% of the processors" in caplog.text
    said = costs().where_it_pays
    assert said.endswith(" (timed while other programs used 50% of the processors)")
    others_use(0.01)
    assert costs().beside == costs().beside == 0.01
    others_use(0.5)
    assert costs().beside == 0.01 and len(calls) == 2
    assert "timed while" not in costs().where_it_pays


def test_the_most_that_may_be_drafted():
    model = TransformerDraft(tiny_t5(0))
    assert costs_lib.largest_limit(model, verifier("block")) == 8
    # Its tokens cost nothing.
    assert costs_lib.largest_limit(CopyDraft(30), verifier("coupled")) == 16
    assert 1 <= costs_lib.largest_limit(model, verifier("tree", widths=(3, 2))) <= 4
