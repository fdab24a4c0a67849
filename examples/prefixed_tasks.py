"""Writes the texts of several tasks to one file of pairs, each source with its task's prefix.

    python examples/prefixed_tasks.py --output data/prefixed/train.tsv.gz \\
        --task "translate English to German: " data/ende/train.tsv.gz 2 \\
        --task "correct: " data/errors/train_errors.tsv.gz 1 \\
        --task "summarize: " data/summarize/debian_train.tsv.gz 2

A task is its prefix, a file of pairs (two columns, or three with a tag first) and the number of
times that its pairs are written. The pairs of all tasks are shuffled. Equal files and seeds make
equal files.
"""

import argparse
import gzip
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from spec_t5x.errors import InputError, check_at_least
from spec_t5x.labs.text_pairs import read_pairs
from spec_t5x.labs.writing import reported
from spec_t5x.machine.atomic import write_whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file; returns 2 for a mistake, which a line on standard error reports."""
    parser = argparse.ArgumentParser(
        prog="prefixed_tasks.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    columns = ("PREFIX", "FILE", "TIMES")
    add("--task", nargs=3, action="append", required=True, metavar=columns, help="see above")
    add("--output", required=True, metavar="FILE", help=".tsv.gz to write")
    add("--seed", type=int, default=0, metavar="N", help="seed of the shuffle (0)")
    add("--first", type=int, metavar="N", help="pairs of each task, after a shuffle of them (all)")
    args = parser.parse_args(arguments)
    shuffle = random.Random(args.seed)
    try:
        check_at_least(args, first=1)
        lines = []
        for prefix, file, times in args.task:
            if not times.isdecimal() or int(times) < 1:
                raise InputError(f"TIMES of {file} is {times!r}: give a number from 1")
            read = (pair for pair in read_pairs(file) if all(map(str.strip, pair)))
            pairs = [f"{prefix}{source}\t{text}\n" for source, text in read]
            shuffle.shuffle(pairs)
            lines += pairs[: args.first] * int(times)
        shuffle.shuffle(lines)
        path = Path(args.output)
        with reported(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Without the time of day: equal pairs make equal files.
            write_whole(path, [gzip.compress("".join(lines).encode(), 1, mtime=0)])
    except InputError as error:
        print(f"prefixed_tasks: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
