"""``spec-t5x reproduce``: the paper's tables and figures, again, as a report."""

import argparse
from pathlib import Path

from spec_t5x.errors import InputError

HELP = "reproduce the paper's tables and figures: a report in HTML and Markdown"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags; a setting that is left out takes its value from gin."""
    add = parser.add_argument
    add("items", nargs="*", metavar="ITEM", help="table1, figure2, …; all stands for every one")
    add("--output", type=Path, metavar="DIR", help="of the report, and of what is kept")
    add("--list", action="store_true", help="list the items and how long they take")
    add("--quick", action="store_true", default=None, help="fewer tokens: minutes, not an hour")
    add(
        "--data_dir",
        type=Path,
        metavar="DIR",
        help="with ende/dev.tsv.gz and summarize/debian_dev.tsv.gz (texts of the package)",
    )
    add("--seed", type=int, metavar="N", help="of all random draws (0)")
    add("--fresh", action="store_true", help="compute again what was kept")
    add("--gin_file", action="append", default=[], metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Exit status 0, 1 if something could not be computed, 2 for a mistake of the user's."""
    import gin

    from spec_t5x.cli.gin_files import parse_gin
    from spec_t5x.cli.settings import say
    from spec_t5x.experiments.reproduction import reproduce
    from spec_t5x.experiments.reproduction.contents import ReproduceOptions

    make = gin.external_configurable(ReproduceOptions, module="spec_t5x")
    parse_gin(args.gin_file, args.gin_bindings)
    names = ("quick", "data_dir", "seed")
    options = make(**{n: getattr(args, n) for n in names if getattr(args, n) is not None})
    if not args.items and not args.list:
        raise InputError("nothing to reproduce: give all, or names that --list shows")
    items = reproduce.select(args.items or [reproduce.ALL])
    if args.list:
        print(reproduce.listing(items, options))
        return 0
    if args.output is None:
        raise InputError("no --output was given: give a directory for the report")
    return reproduce.reproduce(items, options, args.output, say, fresh=args.fresh)
