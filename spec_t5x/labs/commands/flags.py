"""Flags that several commands of this package have."""

import argparse
import os
from pathlib import Path

from spec_t5x.cli import settings
from spec_t5x.errors import InputError
from spec_t5x.labs.benchmark.options import TextSource
from spec_t5x.machine.atomic import check_can_be_made
from spec_t5x.machine.paths import expanded


def add_texts(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``TextSource``: a file, or a seqio task."""
    flags = settings.flags_of(TextSource)
    # Of a task's features, only gin sets the lengths.
    del flags["task_feature_lengths"]
    settings.add_flags(parser.add_argument_group("texts"), flags)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json FILE``, to which a command writes its figures."""
    parser.add_argument(
        "--json", type=_file_to_write, metavar="FILE", help="write all figures to this file"
    )


def _file_to_write(text: str) -> Path:
    try:
        path = expanded(text)
        if os.path.isdir(path):
            raise InputError(f"{path} is a folder: give a file")
        if os.path.isfile(path) or not os.path.exists(path):
            check_can_be_made(path.parent)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path
