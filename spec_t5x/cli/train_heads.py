"""``spec-t5x train-heads``: trains heads that draft from a target's own states."""

import argparse

HELP = "train draft heads for a target as a gin file says; run again to go on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags; ``--gin.NAME=VALUE`` is taken by every command."""
    parser.add_argument("--gin_file", action="append", required=True, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Trains."""
    from spec_t5x.cli.train import run_as_gin_says
    from spec_t5x.training.run_heads import train_heads

    return run_as_gin_says(train_heads, args)
