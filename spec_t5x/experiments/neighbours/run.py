"""``spec-t5x benchmark neighbours``: our decoding, the neighbours', and the floor under both."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from spec_t5x.errors import InputError
from spec_t5x.experiments.neighbours import tables
from spec_t5x.experiments.neighbours.measuring import measure, num_steps
from spec_t5x.experiments.neighbours.methods import methods
from spec_t5x.experiments.neighbours.options import NeighboursOptions
from spec_t5x.experiments.neighbours.results import Group
from spec_t5x.experiments.neighbours.weights import (
    Given,
    pair_with_texts,
    sizes_with_random_weights,
)
from spec_t5x.generation import GenerateOptions

HELP = "the same weights in other implementations, and the floor that memory sets"

Options = NeighboursOptions


def run(
    options: NeighboursOptions,
    report: Callable[[int, int, str], None] | None = None,
    *,
    models: Any,
    decoding: GenerateOptions | None = None,
) -> Iterator[Group]:
    """Measures the pair, or one size after the other.

    Args:
      options: what to measure.
      report: ``report(done, total, what)`` is told of what is being done.
      models: the target and its draft (``cli.settings.Models``); not read for ``sizes``.
      decoding: lengths of the pair's inputs and outputs; not read for ``sizes``.

    Raises:
      InputError: settings or checkpoints that cannot be compared, or no CPU to compare on.
      MeasurementError: an implementation that had worked gave no answer.
    """
    if jax.default_backend() != "cpu":
        raise InputError(
            f"JAX's device is a {jax.default_backend()} and implementations are compared on the "
            "CPU: set JAX_PLATFORMS=cpu"
        )
    with tempfile.TemporaryDirectory() as folder:
        for number, given in enumerate(_given(options, models, decoding, Path(folder))):
            yield measure(given, options, _teller(given, number, options, report))


def table(groups: Sequence[Group]) -> str:
    """A Markdown table for each target."""
    return tables.full([group.to_dict() for group in groups])


def to_dict(groups: Sequence[Group]) -> dict[str, Any]:
    """All figures, as JSON can hold them."""
    return {"groups": [group.to_dict() for group in groups]}


def _given(
    options: NeighboursOptions, models: Any, decoding: GenerateOptions | None, folder: Path
) -> Iterator[Given]:
    if options.sizes:
        yield from sizes_with_random_weights(options, folder)
    else:
        yield pair_with_texts(options, models, decoding or GenerateOptions(), folder)


def _teller(
    given: Given, number: int, options: NeighboursOptions, report: Callable | None
) -> Callable[[str], None]:
    """Counts what ``measure`` tells of, over all sizes."""
    steps = num_steps(len(methods(options, given.job)), options)
    done, total = number * steps, max(len(options.sizes), 1) * steps

    def tell(what: str) -> None:
        nonlocal done
        if report:
            report(done, total, f"{given.title}: {what}")
        done += 1

    return tell
