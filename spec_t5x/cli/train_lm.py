"""``spec-t5x train-lm``: trains a decoder-only language model as a gin file says."""

import argparse

from spec_t5x.cli.train import add_arguments, run_as_gin_says

__all__ = ["HELP", "add_arguments", "run"]

HELP = "train a language model as a gin file says; run again to go on after an interruption"


def run(args: argparse.Namespace) -> int:
    """Trains."""
    from spec_t5x.training.run_lm import train_lm

    return run_as_gin_says(train_lm, args)
