"""One line of JSON for each input, an answer or the reason why there is none."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from spec_t5x.generation import Generation
from spec_t5x.inference.inputs import Item


def answer(item: Item, generations: Sequence[Generation]) -> bytes:
    """The line of an input that was decoded.

    Args:
      item: the input.
      generations: its outputs, the best first.

    Returns:
      T5X's fields ``inputs`` (the texts, and what else the input came with) and
      ``prediction``, then those of ``spec-t5x generate --json`` of the best output; with
      several, all of them under ``decodes``.
    """
    best = generations[0]
    values = _head(item) | {"inputs": item.fields, "prediction": best.output}
    values |= dataclasses.asdict(best)
    if len(generations) > 1:
        values["decodes"] = [_without_input(generation) for generation in generations]
    return _line(values)


def refusal(item: Item, reason: str) -> bytes:
    """The line of an input that cannot be decoded."""
    place, number = item.place
    values = {"index": item.index, place: number, "error": reason}
    values |= {"task": item.task} if item.task else {}
    return _line(values | {"inputs": item.fields})


def _head(item: Item) -> dict[str, Any]:
    return {"index": item.index} | ({"task": item.task} if item.task else {})


def _without_input(generation: Generation) -> dict[str, Any]:
    values = dataclasses.asdict(generation)
    del values["input"]
    return values


def _line(values: dict[str, Any]) -> bytes:
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can say and UTF-8 cannot.
        return json.dumps(values).encode() + b"\n"
