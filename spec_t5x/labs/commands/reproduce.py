"""``spec-t5x reproduce``: the paper's tables and figures, reproduced as a report."""

import argparse
from pathlib import Path

from spec_t5x.cli import settings
from spec_t5x.errors import InputError
from spec_t5x.machine.extras import needed
from spec_t5x.machine.paths import expanded

HELP = "reproduce the paper's tables and figures in an HTML report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags. A flag that is left out takes its value from gin."""
    add = parser.add_argument
    add("items", nargs="*", metavar="ITEM", help="table1, figure2, … (see --list), or all")
    add("--output", type=Path, metavar="DIR", help="directory to write the report to")
    add("--list", action="store_true", help="list the items and exit")
    flags = {
        "quick": (bool, "decode fewer tokens: minutes, not an hour"),
        "data_dir": (
            "DIR",
            "folder with ende/dev.tsv.gz, summarize/debian_dev.tsv.gz (default: the package's)",
        ),
        "seed": (int, "random seed (default: 0)"),
        "target": ("NAME", "for public: a T5 1.0, such as t5-3b (default: the largest that fits)"),
        "models": ("DIR", "for public: T5 1.0 of fetch_checkpoints.sh, in place of the Hub's"),
        "data": (["TASK=FILE", "data"], "for public: text pairs of EnDe or CNN/DM; repeatable"),
        "ngrams": ("DIR", "for public: n-gram tables of T5's vocabulary, as two more drafts"),
        "pairs": ("FILE", "for public: a JSON list of other pairs (docs/reproducing.md)"),
    }
    settings.add_flags(parser, flags)
    settings.add_gin(parser)


def run(args: argparse.Namespace) -> int:
    """Writes the report, or lists the items; returns 1 if an item fails, else 0."""
    with needed("matplotlib"):
        from spec_t5x.labs.reproduction import run as running
        from spec_t5x.labs.reproduction.contents import ReproduceOptions

    (options,) = settings.configured(args, ReproduceOptions)
    if not args.items and not args.list:
        raise InputError("nothing to reproduce: give all, or names that --list shows")
    items = running.select(args.items or running.ITEMS)
    if args.list:
        print("\n".join(f"{name:8} {item.title}" for name, item in items.items()))
        return 0
    if args.output is None:
        raise InputError("no --output was given: give a directory for the report")
    return running.reproduce(items, options, expanded(args.output))
