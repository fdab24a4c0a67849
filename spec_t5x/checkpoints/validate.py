"""Checks on what a checkpoint holds, with every fault in one line."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from spec_t5x.checkpoints.abstract import expected_shapes
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import PyTree

# Faults named in full in a message; the rest is counted.
_NUM_NAMED = 3

# Elements looked at in one go: bounds the memory that the check takes.
_FINITE_BLOCK = 1 << 24


def check_params(params: PyTree, config: T5Config, source: str) -> None:
    """Compares a tree of parameters with the one that ``config`` asks for.

    Args:
        params: nested dicts of arrays, without the outer ``{"params": ...}``.
        config: the model they are meant for.
        source: where they come from; the message begins with it.

    Raises:
        InputError: parameters are missing, unexpected or of the wrong shape (all
            of them are reported at once), or hold NaN or infinity.
    """
    flat = flatten_dict(params, sep="/")
    shapes = {path: np.shape(leaf) for path, leaf in flat.items()}
    check_shapes(shapes, expected_shapes(config), source)
    check_finite(flat, source)


def check_shapes(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    source: str,
) -> None:
    """Compares the shapes of named tensors.

    Raises:
        InputError: one line with the missing, the unexpected and the wrong ones.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    wrong = [
        f"{name} is {list(found[name])}, not {list(expected[name])}"
        for name in expected
        if name in found and tuple(found[name]) != tuple(expected[name])
    ]
    faults = [
        f"{len(names)} {kind} ({_listed(names, separator)})"
        for names, kind, separator in (
            (missing, "missing", ", "),
            (unexpected, "unexpected", ", "),
            (wrong, "of the wrong shape", "; "),
        )
        if names
    ]
    if faults:
        raise InputError(
            f"{source}: tensors do not fit the model's configuration: "
            f"{', '.join(faults)}: use the config.json the weights were saved with"
        )


def check_finite(tensors: Mapping[str, Any], source: str) -> None:
    """Looks for NaN and infinity.

    Raises:
        InputError: one line with the names of the tensors that hold any.
    """
    broken = [name for name, tensor in tensors.items() if not _is_finite(tensor)]
    if broken:
        raise InputError(
            f"{source}: NaN or infinite weights in {len(broken)} of {len(tensors)} "
            f"tensors ({_listed(broken, ', ')}): use an earlier checkpoint or copy "
            "this one again"
        )


def check_vocabulary_fits(vocabulary: Vocabulary, config: T5Config, source: str) -> None:
    """Every id of the vocabulary needs a row in the embedding; more rows are padding.

    Raises:
        InputError: there are more ids than rows.
    """
    if vocabulary.vocab_size > config.vocab_size:
        raise InputError(
            f"{source}: the vocabulary has {vocabulary.vocab_size} ids, the model "
            f"embeds {config.vocab_size}: give the vocabulary it was trained with, "
            "and its number of extra_ids"
        )


def _is_finite(tensor: Any) -> bool:
    flat = np.asarray(tensor).reshape(-1)
    return all(
        np.isfinite(flat[start : start + _FINITE_BLOCK]).all()
        for start in range(0, flat.size, _FINITE_BLOCK)
    )


def _listed(names: Sequence[str], separator: str) -> str:
    shown = separator.join(names[:_NUM_NAMED])
    rest = len(names) - _NUM_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown
