"""Parts of the commands of this folder: their parser, and measuring row by row."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_t5x.errors import InputError, is_out_of_memory, one_line
from spec_t5x.labs.benchmark import results
from spec_t5x.machine import xla_flags
from spec_t5x.machine.description import machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Returns the parser of ``python -m benchmarks.NAME``, which shows the description as it is."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def plot(name: str, description: str, draw: Callable[[Any], "Figure"]) -> None:
    """Runs ``python -m benchmarks.NAME FIGURES.json PICTURE.svg``, which draws the figures."""
    arguments = parser(name, description)
    arguments.add_argument("figures", type=Path, metavar="FIGURES.json", help="results to draw")
    arguments.add_argument("picture", type=Path, metavar="PICTURE.svg", help="picture to write")
    args = arguments.parse_args()
    draw(json.loads(args.figures.read_text(encoding="utf-8"))).savefig(args.picture, format="svg")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of a run for its JSON file."""
    return {name: value for name, value in vars(args).items() if name != "json"}


def refuse(name: str, error: InputError) -> int:
    """Prints an input error as one line; returns the exit status 2."""
    print(f"{name}: error: {error}", file=sys.stderr)
    return 2


def run(
    name: str,
    args: argparse.Namespace,
    rows: Iterable[dict[str, Any]],
    table: Callable[[list[dict[str, Any]]], Any],
    settings: dict[str, Any],
) -> int:
    """Measures ``rows`` and shows their table; returns 0, or 2 on an input error.

    If ``args.json`` is given, the file has the settings, the peak memory and the rows so far. It is
    written for each row, and again for a row that comes again because it was completed. Too little
    memory on the device is an input error.
    """
    kept: list[dict[str, Any]] = []
    failure = None
    try:
        for row in rows:
            if not any(row is each for each in kept):
                kept.append(row)
            if args.json:
                memory = {"peak_memory_bytes": results.peak_memory()}
                results.write_json(args.json, {**settings, **memory, "rows": kept})
    except InputError as error:
        failure = error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = InputError(f"{one_line(error)}: take fewer rows, or a smaller model")
    if kept or not failure:
        results.show(table(kept))
    return refuse(name, failure) if failure else 0


def run_timed(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], Iterable[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]]], Any],
) -> int:
    """Calls ``run`` for rows of times on this machine, which its file describes."""
    args = parser.parse_args(arguments)
    xla_flags.apply()
    name = parser.prog.rpartition(".")[2]
    return run(name, args, measure(args), table, {"machine": machine(), **options(args)})
