"""Corrections against figures that were worked out by hand."""

import pytest
from corrections import Correction, changes, figures, intervals

SOURCES = ["he go to the the school", "all is well", "a b c", "one too three"]
TARGETS = ["he goes to the school", "all is well", "a b c", "one two three"]
OUTPUTS = ["he goes to the the school", "all is well", "a x c d", "one two tree"]


def test_changes_by_hand():
    assert changes("he go to the the school", "he goes to the school") == {
        (1, 2, ("goes",)),
        (4, 5, ()),
    }
    assert changes("a b", "x y") == {(0, 1, ("x",)), (1, 2, ("y",))}
    assert changes("a b c", "a b c") == set()
    assert changes("", "a b") == {(0, 0, ("a", "b"))}


def test_figures_by_hand():
    """3 changes are due and 2 of them made; of 5 made, 2 are right."""
    targets = [Correction(*pair) for pair in zip(SOURCES, TARGETS, strict=True)]
    found = figures(targets, OUTPUTS)
    precision, recall = 100 * 2 / 5, 100 * 2 / 3
    assert found == {
        "exact_match": 25.0,
        "errors_corrected": pytest.approx(recall),
        "changes_right": pytest.approx(precision),
        # Two changes of one of two right texts.
        "false_changes": 100.0,
        "f0.5": pytest.approx(1.25 * precision * recall / (0.25 * precision + recall)),
    }
    for name, (low, high) in intervals(targets, OUTPUTS).items():
        assert low <= found[name] <= high


def test_what_nothing_was_counted_of_is_left_out():
    found = figures([Correction("a", "a")], ["a"])
    assert found == {"exact_match": 100.0, "false_changes": 0.0}
    found = figures([Correction("a", "b")], ["a"])
    assert found == {"exact_match": 0.0, "errors_corrected": 0.0}
