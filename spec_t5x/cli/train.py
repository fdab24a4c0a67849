"""``spec-t5x train``: trains a target or a draft as a gin file says."""

import argparse
from collections.abc import Callable

HELP = "train a model as a gin file says; run again to go on after an interruption"

# Exit status of a run that TrainOptions.max_minutes ended before its steps were taken: what
# sysexits.h has for "try again later".
OUT_OF_TIME = 75


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags; ``--gin.NAME=VALUE`` is taken by every command."""
    parser.add_argument("--gin_file", action="append", required=True, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Trains."""
    from spec_t5x.training.run import train

    return run_as_gin_says(train, args)


def run_as_gin_says(configurable: Callable, args: argparse.Namespace) -> int:
    """Calls a training, which is a gin configurable, with what files and flags bind.

    Exit status 0, or ``OUT_OF_TIME``.
    """
    from spec_t5x.cli.gin_files import parse_gin
    from spec_t5x.errors import InputError

    parse_gin(args.gin_file, args.gin_bindings)
    try:
        result = configurable()
    except TypeError as error:
        reason = str(error).splitlines()[0]
        if "missing" not in reason:
            raise
        raise InputError(f"gin: {reason}: bind it in the gin file") from error
    return 0 if result.finished else OUT_OF_TIME
