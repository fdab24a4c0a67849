"""Runs the commands of the packaged models' cards again and compares the figures.

    python scripts/check_cards.py --data data                  # all cards: takes hours
    python scripts/check_cards.py --data data ende-draft lm-draft

A card is ``spec_t5x/pretrained/NAME/README.md``. Its ``spec-t5x evaluate`` commands belong to the
rows of its table, in the same order, and are run in the folder of ``--data`` that the card names.
A figure with a 95 % interval, ``0.712 (0.703–0.723)``, must be within it.

To package what a training exported, copy its folder there, add ``max_source_length`` and
``training_steps`` to its ``config.json``, and edit the card.
"""

import argparse
import functools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from spec_t5x.checkpoints.loading import PACKAGED_MODELS
from spec_t5x.errors import InputError

# How cards call the figures that ``spec-t5x evaluate`` prints.
FIGURES = {
    "BLEU": "bleu",
    "ROUGE-1": "rouge1",
    "ROUGE-2": "rouge2",
    "ROUGE-Lsum": "rougeLsum",
    "alpha": "alpha",
    "block efficiency": "block_efficiency",
}
_INTERVAL = re.compile(r"(?:(\S+) )?([\d.]+) \(([\d.]+)–([\d.]+)\)")


class Measurement(NamedTuple):
    """A row of a card's table, with the arguments of ``spec-t5x evaluate`` that it comes from."""

    text: str
    arguments: str
    # Of the data, which the command runs in.
    folder: str
    # By the name that ``evaluate`` prints: value, lower and upper end of the interval.
    intervals: dict[str, tuple[float, float, float]]


def read_card(text: str) -> list[Measurement]:
    """Reads the measurements of a card; none if it has no command.

    Raises:
      ValueError: not one command for each row of the table, or no folder.
    """
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("|--")
    ]
    commands = re.findall(r"^spec-t5x evaluate (.*)$", text, re.MULTILINE)
    folders = re.findall(r"measured, in `data/(\w+)`", text)
    if not commands:
        return []
    if len(rows) != len(commands) + 1 or len(folders) != 1:
        raise ValueError(f"{len(rows) - 1} rows, {len(commands)} commands, folders {folders}")
    header, *rows = rows
    measurements = []
    for row, arguments in zip(rows, commands, strict=True):
        intervals = {
            # A cell of several figures names each.
            FIGURES[label or name]: tuple(map(float, numbers))
            for name, cell in zip(header, row, strict=True)
            for label, *numbers in _INTERVAL.findall(cell)
        }
        measurements.append(Measurement(row[0], arguments, folders[0], intervals))
    return measurements


@functools.cache
def evaluate(arguments: str, folder: Path) -> dict[str, Any]:
    """Runs ``spec-t5x evaluate``, once for cards that share a command; returns its figures."""
    print(f"spec-t5x evaluate {arguments}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "spec_t5x.cli.main", "evaluate", *shlex.split(arguments)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise InputError(f"spec-t5x evaluate {arguments} ended with {done.returncode}: see above")
    return json.loads(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; returns 1 if a figure is outside its interval, 2 if a command cannot run."""
    cards = {path.parent.name: path for path in sorted(PACKAGED_MODELS.glob("*/README.md"))}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="holds the folders of the cards")
    parser.add_argument("names", nargs="*", metavar="NAME", help="(all)")
    args = parser.parse_args(arguments)
    names, found = args.names or cards, []
    try:
        if unknown := set(names) - set(cards):
            raise InputError(f"no packaged model {unknown.pop()!r}: choose of {', '.join(cards)}")
        texts = {name: cards[name].read_text(encoding="utf-8") for name in names}
        claims = [(name, each) for name, text in texts.items() for each in read_card(text)]
        # All of them before the first, which may be long.
        for folder in {args.data / each.folder for _, each in claims}:
            if not folder.is_dir():
                raise InputError(f"no folder {folder}: give --data the folder that holds it")
        for name, each in claims:
            printed = evaluate(each.arguments, args.data / each.folder)
            for figure, (value, low, high) in each.intervals.items():
                now, claim = printed[figure], f"{value} ({low}–{high})"
                verdict = "within" if low <= now <= high else "OUTSIDE"
                found.append((name, each.text, figure, claim, f"{now:.3f}", verdict))
    except InputError as error:
        print(f"check_cards: error: {error}", file=sys.stderr)
        return 2
    print(tabulate(found, ("model", "text", "figure", "card", "now", ""), "pipe"))
    return int(any(row[-1] == "OUTSIDE" for row in found))


if __name__ == "__main__":
    sys.exit(main())
