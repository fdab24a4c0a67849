"""Writes pairs of a text with errors and the text, to train or evaluate a corrector.

    python examples/corrections/make_errors.py --data texts.txt --output errors.tsv.gz

Prints one JSON object with the numbers of pairs. Equal texts and seeds make equal files.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from english_errors import KINDS, RIGHT, pairs

from spec_t5x.data.tsv import read_lines
from spec_t5x.errors import InputError, check_at_least
from spec_t5x.machine.atomic import reported, write_whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file; returns 2 for a mistake, which a line on standard error reports."""
    parser = argparse.ArgumentParser(
        prog="make_errors.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help="one text a line, or .tsv; gzipped or not")
    add("--output", required=True, metavar="FILE", help=".tsv to write, gzipped if it ends in .gz")
    add("--column", type=int, default=0, metavar="N", help="of the texts, from 0 (0)")
    add("--num_columns", type=int, default=1, metavar="N", help="of each line (1)")
    add("--copies", type=int, default=1, metavar="N", help="of each text, with other errors (1)")
    add("--seed", type=int, default=0, metavar="N", help="other errors for another seed (0)")
    rate = "share of the words with an error (drawn for each text, with one error at least)"
    add("--rate", type=float, metavar="SHARE", help=rate)
    right = f"share of the texts without errors ({RIGHT})"
    add("--right", type=float, default=RIGHT, metavar="SHARE", help=right)
    add("--kinds", nargs="+", default=tuple(KINDS), metavar="KIND", help=", ".join(KINDS))
    add("--overwrite", action="store_true", help="replace an earlier file")
    try:
        _write(parser.parse_args(arguments))
    except InputError as error:
        print(f"make_errors: error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(args: argparse.Namespace) -> None:
    check_at_least(args, copies=1)
    path = Path(args.output)
    if path.exists() and not args.overwrite:
        raise InputError(f"{path} exists: choose another file or pass --overwrite")
    texts = read_lines([args.data], (args.column,), args.num_columns)
    settings = {"rate": args.rate, "right": args.right, "kinds": args.kinds}
    found = list(pairs(texts, seed=args.seed, copies=args.copies, **settings))
    content = "".join(f"{source}\t{target}\n" for source, target in found).encode()
    if path.suffix == ".gz":
        # Without the time of day: equal pairs make equal files.
        content = gzip.compress(content, mtime=0)
    with reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [content])
    right = sum(source == target for source, target in found)
    print(json.dumps({"output": args.output, "pairs": len(found), "right": right}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
