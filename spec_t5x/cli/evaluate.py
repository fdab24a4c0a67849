"""``spec-t5x evaluate``: BLEU and acceptance over a file of sentence pairs."""

import argparse
import dataclasses
import json

from spec_t5x.cli import settings
from spec_t5x.errors import InputError

HELP = "BLEU and acceptance over a tab-separated file of sentence pairs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--data", required=True, metavar="FILE", help=".tsv or .tsv.gz")
    parser.add_argument("--source_column", type=int, default=0, metavar="N", help="from 0 (0)")
    parser.add_argument("--target_column", type=int, default=1, metavar="N", help="from 0 (1)")
    parser.add_argument("--num_columns", type=int, default=2, metavar="N", help="of each line (2)")
    parser.add_argument("--limit", type=int, metavar="N", help="take the first N pairs only")
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluates and prints one JSON object."""
    models, options = settings.read(args)
    draft = models.draft_name()

    from rich.console import Console
    from rich.progress import Progress

    from spec_t5x.compilation_cache import enable
    from spec_t5x.data.tsv import read_pairs
    from spec_t5x.experiments.evaluation import evaluate
    from spec_t5x.generation import Generator

    if args.limit is not None and args.limit < 1:
        raise InputError(f"limit is {args.limit}: give at least 1")
    columns = (args.source_column, args.target_column, args.num_columns)
    pairs = list(read_pairs(args.data, *columns))[: args.limit]
    enable()
    generator = Generator.load(models.target, draft, models.draft_options())
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("evaluating", total=len(pairs))
        evaluation = evaluate(
            generator,
            pairs,
            options,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    print(json.dumps(dataclasses.asdict(evaluation), indent=2))
    return 0
