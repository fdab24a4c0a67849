"""Totals of acceptance statistics."""

import pytest

pytest.importorskip("t5x.infer", reason="needs T5X")

from spec_t5x.t5x_plugin.acceptance import totals


def test_totals_are_of_all_examples_together():
    sampled = {"target_calls": [2, 3], "appended": [4, 6], "proposed": [9, 7], "accepted": [2, 2]}
    rates = {"verified": [4, 1], "beta_sum": [2.5, 0.5], "scores": [-1.0, -2.0]}
    counts = {"target_calls": 5.0, "block_efficiency": 2.0}
    assert totals(sampled | rates) == counts | {"acceptance_rate": 0.8, "alpha": 0.6}
    assert totals(sampled | {"verified": [0, 0], "beta_sum": [0.0, 0.0]}) == counts
    assert totals({"target_calls": [2, 3], "steps": [4, 6]}) == counts
    assert totals({"scores": [-1.0]}) == totals({"target_calls": [0], "appended": [0]}) == {}
