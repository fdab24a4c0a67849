"""Writes the README's tables anew from the results that are kept in ``benchmarks/``.

    python scripts/readme_tables.py            # after a benchmark's file has changed
    python scripts/readme_tables.py --check    # says whether there is anything to write

A table stands between two comments, of which the first names its kind and its file:

    <!-- table: neighbours benchmarks/neighbours_pair.json -->
    <!-- end of table -->
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from spec_t5x.experiments import objectives, pacing

REPOSITORY = Path(__file__).resolve().parents[1]
# benchmarks/ is not installed with the package.
sys.path.insert(0, str(REPOSITORY))
from benchmarks.other_implementations.table import table as implementations  # noqa: E402

README = REPOSITORY / "README.md"


def synthetic(values: Mapping[str, Any]) -> str:
    """Measured speed-ups at real size, beside what the paper measured."""
    headers = ("task", "draft", "temp.", "gamma", "alpha", "c", "T(verify)", "block efficiency")
    rows = [
        [row["row"]["paper"]["task"], row["row"]["draft"], f"{row['row']['temperature']:g}"]
        + [row["row"]["gamma"], row["row"]["alpha"], f"{row['c']:.3f}"]
        + [f"{row['verification_cost']:.2f}", f"{row['block_efficiency']:.2f}"]
        + [f"**{row['speed_up']:.2f}**", f"{row['loop_speed_up']:.2f}"]
        + [row["row"]["paper"]["measured"]]
        for row in values["rows"]
    ]
    headers += ("speed-up", "loop alone", "the paper's, TPU-v4")
    return tabulate(rows, headers, "pipe", disable_numparse=True)


def paces(values: Mapping[str, Any]) -> str:
    """Gamma auto beside plain decoding and fixed gammas."""
    names = [field.name for field in dataclasses.fields(pacing.Row)]
    rows = []
    for kept in values["rows"]:
        # JSON has neither tuples nor numbers as keys.
        fixed = {int(gamma): seconds for gamma, seconds in kept["fixed_seconds"].items()}
        row = {name: kept[name] for name in names}
        rows.append(pacing.Row(**row | {"costs": tuple(kept["costs"]), "fixed_seconds": fixed}))
    return pacing.table(rows)


# What makes a table of what a file holds.
MAKERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "neighbours": lambda values: implementations(values["groups"], values["machine"]),
    "pacing": paces,
    "synthetic": synthetic,
    "objectives": lambda values: objectives.table_of(values["rows"]),
}
_TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(text: str, folder: Path) -> str:
    """The text with every table made anew.

    Args:
      text: Markdown.
      folder: what the files' paths are relative to.

    Raises:
      KeyError: a kind of table that is not known.
      OSError: a file that cannot be read.
    """

    def make(found: re.Match) -> str:
        start, kind, file, end = found.groups()
        values = json.loads((folder / file).read_text(encoding="utf-8"))
        return f"{start}\n{MAKERS[kind](values)}\n\n{end}"

    return _TABLE.sub(make, text)


def main() -> int:
    """Exit status 1 if ``--check`` finds something to write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    before = README.read_text(encoding="utf-8")
    after = filled(before, REPOSITORY)
    if before == after:
        return 0
    if args.check:
        print("README.md: a table is not that of its file: run scripts/readme_tables.py")
        return 1
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
