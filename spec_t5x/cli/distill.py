"""``spec-t5x distill``: trains a draft for a target, by its acceptance rate."""

import argparse

from spec_t5x.cli.train import add_arguments, run_as_gin_says

__all__ = ["HELP", "add_arguments", "run"]

HELP = "train a draft for a target as a gin file says; run again to go on after an interruption"


def run(args: argparse.Namespace) -> int:
    """Trains."""
    from spec_t5x.training.run_distill import distill

    return run_as_gin_says(distill, args)
