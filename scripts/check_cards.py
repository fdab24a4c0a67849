"""Reruns the commands on the packaged models' cards and compares the results.

    python scripts/check_cards.py --data data                  # all cards: takes hours
    python scripts/check_cards.py --data data t5-draft lm-draft

A card is ``spec_t5x/pretrained/NAME/README.md``. Each row of its table has a ``spec-t5x evaluate``
command, in the same order, which runs in ``--data``. A rerun passes if each new figure is within
the card's 95 % interval, as in ``0.712 (0.703–0.723)``.

To package what a training exported, copy its folder there, add ``training_steps`` to its
``config.json``, and edit the card.
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

# Keys of the JSON that ``spec-t5x evaluate`` prints, by their names on cards.
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
    """Row of a card's table: its text, and the arguments of ``spec-t5x evaluate`` behind it."""

    text: str
    arguments: str
    # (value, lower end, upper end) by the key that ``evaluate`` prints.
    intervals: dict[str, tuple[float, float, float]]


def read_card(text: str) -> list[Measurement]:
    """Returns the measurements of a card's text; an empty list if it has no command.

    Raises:
      ValueError: rows and commands differ in number.
    """
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("|--")
    ]
    commands = re.findall(r"^spec-t5x evaluate (.*)$", text, re.MULTILINE)
    if not commands:
        return []
    if len(rows) != len(commands) + 1:
        raise ValueError(f"{len(rows) - 1} rows, {len(commands)} commands")
    header, *rows = rows
    measurements = []
    for row, arguments in zip(rows, commands, strict=True):
        intervals = {
            # A cell with several figures has a name before each; others take the header.
            FIGURES[label or name]: tuple(map(float, numbers))
            for name, cell in zip(header, row, strict=True)
            for label, *numbers in _INTERVAL.findall(cell)
        }
        measurements.append(Measurement(row[0], arguments, intervals))
    return measurements


@functools.cache
def evaluate(arguments: str, folder: Path) -> dict[str, Any]:
    """Returns the JSON of ``spec-t5x evaluate``, which runs once per command."""
    print(f"spec-t5x evaluate {arguments}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "spec_t5x.cli.main", "evaluate", *shlex.split(arguments)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise InputError(f"spec-t5x evaluate {arguments} ended with {done.returncode}: see above")
    return json.loads(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; returns 0, or 1 if a figure is outside its interval, or 2 on an error."""
    cards = {path.parent.name: path for path in sorted(PACKAGED_MODELS.glob("*/README.md"))}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "folder of the texts, from which the paths on the cards start"
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help=text)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to check (all)")
    args = parser.parse_args(arguments)
    names, found = args.names or cards, []
    try:
        if unknown := set(names) - set(cards):
            raise InputError(f"no packaged model {unknown.pop()!r}: choose of {', '.join(cards)}")
        texts = {name: cards[name].read_text(encoding="utf-8") for name in names}
        claims = [(name, each) for name, text in texts.items() for each in read_card(text)]
        # Checked before the first command, since commands take long.
        if claims and not args.data.is_dir():
            raise InputError(f"no folder {args.data}: give --data one with the texts")
        for name, each in claims:
            printed = evaluate(each.arguments, args.data)
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
