"""Checks on what a checkpoint holds, with every fault in one line."""

from collections.abc import Mapping, Sequence
from typing import Any

from spec_t5x.errors import InputError

# What weights may be stored as.
_TYPES = ("float32", "bfloat16", "float16", "float64")
# Faults of a kind that a message names.
_NAMED = 6


def check_tensors(
    found: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], source: str
) -> None:
    """Compares tensors, each with a ``shape`` and a ``dtype``, with the shapes expected.

    Raises:
        InputError: one line with every kind of fault: missing, unexpected, of the wrong shape
            or of a type that weights do not have.
    """
    common = [name for name in expected if name in found]
    faults = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "of the wrong shape": [
            f"{name} is {list(found[name].shape)}, not {list(expected[name])}"
            for name in common
            if tuple(found[name].shape) != tuple(expected[name])
        ],
        f"not stored as {', '.join(_TYPES[:-1])} or {_TYPES[-1]}": [
            f"{name} is {found[name].dtype}"
            for name in common
            if str(found[name].dtype) not in _TYPES
        ],
    }
    texts = [f"{len(names)} {kind} ({listed(names)})" for kind, names in faults.items() if names]
    if texts:
        raise InputError(
            f"{source}: tensors do not fit the model's configuration: {', '.join(texts)}: copy the "
            "whole checkpoint again, with the configuration the weights were saved with"
        )


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
