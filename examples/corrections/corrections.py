"""Quality of corrections: changes that a corrector made, compared with the reference changes.

Changes are found word by word (difflib). Two changes are equal if they replace the same words by
the same words, as in M2 (Dahlmeier and Ng 2012) and ERRANT, without ERRANT's categories.
"""

import dataclasses
import difflib
from collections.abc import Sequence

import numpy as np

from spec_t5x.labs.estimates import Bootstrap, ratio
from spec_t5x.types import Int


@dataclasses.dataclass(frozen=True)
class Correction:
    """Text with errors (``source``) and its reference correction (``target``)."""

    source: str
    target: str


def changes(source: str, text: str) -> set[tuple[int, int, tuple[str, ...]]]:
    """Returns (start, end, new words) of each changed span of the source's words."""
    old, new = source.split(), text.split()
    found = set()
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if kind == "equal":
            continue
        if i_end - i == j_end - j:
            found |= {(i + n, i + n + 1, (new[j + n],)) for n in range(i_end - i)}
        else:
            found.add((i, i_end, tuple(new[j:j_end])))
    return found


def figures(targets: Sequence[Correction], predictions: Sequence[str]) -> dict[str, float]:
    """Computes exact match, recall (errors corrected), precision and F0.5, all in percent.

    ``false_changes`` counts changes per 100 texts without errors; figures of no text are omitted.
    """
    parts = _parts(targets, predictions)
    found = {
        name: 100.0 * float(sums.sum() / counts.sum())
        for name, (sums, counts) in parts.items()
        if counts.sum()
    }
    if recall := found.get("errors_corrected"):
        precision = found["changes_right"]
        found["f0.5"] = 1.25 * precision * recall / (0.25 * precision + recall)
    return found


def intervals(
    targets: Sequence[Correction], predictions: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Computes 95 % intervals of all ``figures`` but F0.5, bootstrapped over texts."""
    found = {
        name: ratio(sums, counts, Bootstrap())
        for name, (sums, counts) in _parts(targets, predictions).items()
    }
    return {
        name: (100.0 * each.low, 100.0 * each.high)
        for name, each in found.items()
        if each and each.low is not None
    }


def _parts(
    targets: Sequence[Correction], predictions: Sequence[str]
) -> dict[str, tuple[Int[np.ndarray, "texts"], Int[np.ndarray, "texts"]]]:
    """Returns, by figure, numerator and denominator of each text; the figure is sum over sum."""
    due = [changes(each.source, each.target) for each in targets]
    made = [changes(each.source, text) for each, text in zip(targets, predictions, strict=True)]
    right = [len(one & other) for one, other in zip(due, made, strict=True)]
    equal = [each.target == text for each, text in zip(targets, predictions, strict=True)]
    num_due, num_made = ([len(each) for each in sets] for sets in (due, made))
    unchanged = [not each for each in num_due]
    false = [
        number if was_right else 0 for number, was_right in zip(num_made, unchanged, strict=True)
    ]
    found = {
        "exact_match": (equal, [1] * len(equal)),
        "errors_corrected": (right, num_due),
        "changes_right": (right, num_made),
        "false_changes": (false, unchanged),
    }
    return {
        name: (np.array(sums, int), np.array(counts, int)) for name, (sums, counts) in found.items()
    }
