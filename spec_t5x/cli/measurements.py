"""What ``benchmark``, ``acceptance`` and ``evaluate`` share: flags, options and progress."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from spec_t5x.cli import settings

_TEXTS = {
    "data": ("FILE", "pairs, .tsv or .jsonl, gzipped or not"),
    "source_column": (int, "of a .tsv, from 0 (of two columns the first, of more the second)"),
    "target_column": (int, "of a .tsv, from 0 (the one after it)"),
    "num_columns": (int, "of each line of a .tsv (as of the first line)"),
    "limit": (int, "take the first N pairs only"),
    "source_words": (int, "of a file: take the first N words of each source only"),
    "source_field": ("NAME", "of a .jsonl (article)"),
    "target_field": ("NAME", "of a .jsonl (highlights)"),
    "prefix": ("TEXT", "put before every source of a file"),
    "mixture_or_task": ("NAME", "seqio's name, instead of a file"),
    "split": ("NAME", "of the task (validation)"),
}


def add_texts(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``experiments.text_source.TextSource``: a file, or a seqio task."""
    texts = parser.add_argument_group("texts")
    settings.add_flags(texts, _TEXTS)
    texts.add_argument(
        "--task_module",
        action="append",
        dest="task_modules",
        metavar="MODULE",
        help="imported first, for the tasks that it registers",
    )


def add_lists(group: Any, flags: dict[str, tuple[str, Callable, str]]) -> None:
    """Adds flags that may be given several times, by name: the option, the type, the help."""
    for name, (field, kind, text) in flags.items():
        group.add_argument(
            f"--{name}", action="append", type=kind, dest=field, metavar="N", help=text
        )


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal's standard error: ``report(done, total, what)`` moves it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what
        )
