"""Checks on what a checkpoint holds, with every fault in one line."""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.models.binding import ModelConfig, expected_shapes
from spec_t5x.types import PyTree

# What weights may be stored as.
_TYPES = ("float32", "bfloat16", "float16", "float64")

REMEDY = "use the config.json the weights were saved with"

# The number of a layer: our name for it, and Hugging Face's.
_LAYER_NUMBER = re.compile(r"(?<=\blayers_)\d+|(?<=\bblock\.)\d+")

# Elements looked at in one go: bounds the memory that the check takes.
_FINITE_BLOCK = 1 << 24


def check_params(params: PyTree, config: ModelConfig, source: str) -> None:
    """Compares a tree of parameters, without the outer "params", with that of ``config``.

    Raises:
        InputError: parameters are missing, unexpected or of the wrong shape (all
            of them are reported at once), or hold NaN or infinity. The message begins with
            ``source``.
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
        InputError: one line with all that are missing, unexpected or wrong.
    """
    _refuse(_shape_faults(found, expected), source, REMEDY)


def check_tensors(
    found: Mapping[str, Any],
    expected: Mapping[str, tuple[int, ...]],
    source: str,
    remedy: str = REMEDY,
) -> None:
    """Compares stored tensors, each with a ``shape`` and a ``dtype``, with those expected.

    Raises:
        InputError: one line with every fault: missing, unexpected, of the wrong shape or of
            a type that weights do not have.
    """
    faults = _shape_faults({name: tensor.shape for name, tensor in found.items()}, expected)
    foreign = {name: t.dtype for name, t in found.items() if t.dtype not in _TYPES}
    if foreign:
        faults.append(f"{len(foreign)} of a foreign type ({'; '.join(_grouped(foreign, str))})")
        remedy = f"give weights that are {', '.join(_TYPES[:-1])} or {_TYPES[-1]}"
    _refuse(faults, source, remedy)


def _shape_faults(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    wrong = {
        name: (list(found[name]), list(expected[name]))
        for name in expected
        if name in found and tuple(found[name]) != tuple(expected[name])
    }
    shapes = _grouped(wrong, lambda shapes: f"{shapes[0]}, not {shapes[1]}")
    shown = (
        (missing, "missing", ", ".join(compress(missing))),
        (unexpected, "unexpected", ", ".join(compress(unexpected))),
        (wrong, "of the wrong shape", "; ".join(shapes)),
    )
    return [f"{len(names)} {kind} ({text})" for names, kind, text in shown if names]


def _refuse(faults: list[str], source: str, remedy: str) -> None:
    if faults:
        raise InputError(
            f"{source}: tensors do not fit the model's configuration: {', '.join(faults)}: {remedy}"
        )


def _grouped(faults: Mapping[str, Any], describe) -> list[str]:
    """``name is what`` for each, with the layers that share a fault in one."""
    groups = {}
    for name, fault in faults.items():
        groups.setdefault((_template(name), describe(fault)), []).append(name)
    return [f"{text} is {what}" for (_, what), names in groups.items() for text in compress(names)]


def compress(names: Iterable[str]) -> list[str]:
    """The names in fewer words and none of them lost: layers that differ in number share one.

    >>> compress(["layers_0/wi", "layers_1/wi", "layers_3/wi", "scale"])
    ['layers_{0..1,3}/wi', 'scale']
    """
    numbers = {}
    for name in names:
        found = _LAYER_NUMBER.search(name)
        numbers.setdefault(_template(name), []).append(int(found.group()) if found else None)
    return [
        template if found == [None] else template.replace("{}", _ranges(sorted(found)), 1)
        for template, found in numbers.items()
    ]


def _template(name: str) -> str:
    return _LAYER_NUMBER.sub("{}", name, count=1)


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    # Consecutive numbers keep their distance to their place in the list.
    runs = itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])
    bounds = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    texts = [str(first) if first == last else f"{first}..{last}" for first, last in bounds]
    return "{" + ",".join(texts) + "}"


def check_finite(tensors: Mapping[str, Any], source: str) -> None:
    """Looks for NaN and infinity.

    Raises:
        InputError: one line with the names of the tensors that hold any.
    """
    broken = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    refuse_not_finite(broken, len(tensors), source)


def refuse_not_finite(broken: list[str], num_tensors: int, source: str) -> None:
    """Refuses, where there are any, the tensors that hold NaN or infinity.

    Raises:
        InputError: one line with their names.
    """
    if broken:
        raise InputError(
            f"{source}: NaN or infinite weights in {len(broken)} of {num_tensors} "
            f"tensors ({', '.join(compress(broken))}): use an earlier checkpoint or copy "
            "this one again"
        )


def check_vocabulary_fits(vocabulary: Vocabulary, config: ModelConfig, source: str) -> None:
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


def is_finite(tensor: Any) -> bool:
    """Whether an array holds neither NaN nor infinity."""
    flat = np.asarray(tensor).reshape(-1)
    return all(
        np.isfinite(flat[start : start + _FINITE_BLOCK]).all()
        for start in range(0, flat.size, _FINITE_BLOCK)
    )
