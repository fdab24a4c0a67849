"""``spec-t5x make-errors``: right English to pairs of a text with errors and the text."""

import argparse
import gzip
import json
import logging
from pathlib import Path

from spec_t5x.errors import InputError, check_at_least
from spec_t5x.machine.progress import doing

log = logging.getLogger(__name__)

HELP = "put errors into right English, to train or evaluate a corrector"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    from spec_t5x.data.english_errors import KINDS, RIGHT

    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help="one text a line, or .tsv; gzipped or not")
    add("--output", required=True, metavar="FILE", help=".tsv to write, gzipped if it ends in .gz")
    numbers = {
        "column": (0, "of the texts, from 0 (0)"),
        "num_columns": (1, "of each line (1)"),
        "copies": (1, "of each text, with different errors (1)"),
        "seed": (0, "other errors for another seed (0)"),
    }
    for name, (default, text) in numbers.items():
        add(f"--{name}", type=int, default=default, metavar="N", help=text)
    rate = "share of the words with an error (drawn for each text, with one error at least)"
    add("--rate", type=float, metavar="SHARE", help=rate)
    right = f"share of the texts without errors ({RIGHT})"
    add("--right", type=float, default=RIGHT, metavar="SHARE", help=right)
    add("--kinds", nargs="+", default=tuple(KINDS), metavar="KIND", help=", ".join(KINDS))
    add("--overwrite", action="store_true", help="replace an earlier file")


def run(args: argparse.Namespace) -> int:
    """Writes the pairs, and prints one JSON object with their numbers."""
    from spec_t5x.data.english_errors import pairs
    from spec_t5x.data.tsv import read_lines
    from spec_t5x.machine.atomic import reported, write_whole

    check_at_least(args, copies=1)
    path = Path(args.output)
    if path.exists() and not args.overwrite:
        raise InputError(f"{path} exists: choose another file or pass --overwrite")
    texts = read_lines([args.data], (args.column,), args.num_columns)
    settings = {"rate": args.rate, "right": args.right, "kinds": args.kinds}
    with doing(log, f"putting errors into the texts of {args.data}"):
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
    return 0
