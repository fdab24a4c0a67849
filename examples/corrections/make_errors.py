"""Writes pairs (text with errors, correct text), to train or evaluate a corrector.

    python examples/corrections/make_errors.py --data texts.txt --output errors.tsv.gz

Prints the numbers of pairs as JSON. Equal texts, seeds and settings give equal files.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from english_errors import KINDS, RIGHT, pairs

from spec_t5x.errors import InputError, check_at_least
from spec_t5x.labs.text_pairs import read_lines
from spec_t5x.labs.writing import reported
from spec_t5x.machine.atomic import write_whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file; returns 2 for a mistake, which a line on standard error reports."""
    parser = argparse.ArgumentParser(
        prog="make_errors.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help="one text per line, or .tsv; may be gzipped")
    add("--output", required=True, metavar="FILE", help=".tsv to write, gzipped if it ends in .gz")
    add("--column", type=int, default=0, metavar="N", help="column of the texts, from 0 (0)")
    add("--num_columns", type=int, default=1, metavar="N", help="columns per line (1)")
    add("--copies", type=int, default=1, metavar="N", help="pairs per text (1)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the errors (0)")
    rate = "share of words with an error (drawn for each text, with at least one error)"
    add("--rate", type=float, metavar="SHARE", help=rate)
    right = f"share of pairs without errors ({RIGHT})"
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
        # No timestamp, so that equal pairs give equal files.
        content = gzip.compress(content, mtime=0)
    with reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [content])
    right = sum(source == target for source, target in found)
    print(json.dumps({"output": args.output, "pairs": len(found), "right": right}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
