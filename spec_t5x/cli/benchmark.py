"""``spec-t5x benchmark [SUBJECT]``: measurements of one's own models, as a table.

A subject is a module of ``experiments`` with

* ``HELP``, a line for the command's help;
* ``Options``, a frozen dataclass that gin binds under its own name;
* ``run(options, report=None, *, models, decoding)``, which returns the result, or yields it
  row by row; ``report(done, total, what)`` is told what is being measured, ``models`` is a
  ``cli.settings.Models`` and ``decoding`` a ``GenerateOptions``;
* ``table(result)``, Markdown, and ``to_dict(result)``, what JSON can hold. Where ``run``
  yields, the result is the list of its rows.
"""

import argparse
import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from spec_t5x.errors import InputError

HELP = "measure drafts, overheads and growth of cost"

DEFAULT_SUBJECT = "drafts"
# Imported when chosen: each brings what it measures with it.
SUBJECTS = {
    "drafts": "spec_t5x.experiments.benchmark",
    "overhead": "spec_t5x.experiments.overhead",
    "growth": "spec_t5x.experiments.growth",
    "pacing": "spec_t5x.experiments.pacing",
    "objectives": "spec_t5x.experiments.objectives",
}
# The modules' own ``HELP``, which to read would import them all.
ABOUT = {
    "drafts": "drafts and verifiers against plain decoding",
    "overhead": "time of an iteration beyond its draft steps and its verification",
    "growth": "cost by batch, output length, gamma and size",
    "pacing": "what gamma auto is worth, with good drafts and hopeless ones",
    "objectives": "alpha of a draft after equal steps down each objective of distillation",
}
# Settings that say where files are, of the options and of their data.
_PLACES = ("data", "figure", "output_dir", "cache_dir", "directory")
# Flags that are fields of most subjects' options.
_FLAGS = ("data", "mixture_or_task", "split", "num_inputs", "repeats")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags; all else is gin's."""
    parser.add_argument(
        "subject",
        nargs="?",
        choices=tuple(SUBJECTS),
        default=DEFAULT_SUBJECT,
        metavar="SUBJECT",
        help="; ".join(f"{name}: {text}" for name, text in ABOUT.items()) + f" ({DEFAULT_SUBJECT})",
    )
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE")
    parser.add_argument("--data", metavar="FILE", help="pairs, .tsv or .jsonl, gzipped or not")
    parser.add_argument("--mixture_or_task", metavar="NAME", help="seqio's name, instead of a file")
    parser.add_argument("--split", metavar="NAME", help="of the task (validation)")
    parser.add_argument("--num_inputs", type=int, metavar="N", help="inputs to decode")
    parser.add_argument("--repeats", type=int, metavar="N", help="of all that is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures there")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a Markdown table, keeps the figures as JSON if asked to."""
    import gin
    from rich.console import Console
    from rich.progress import Progress

    from spec_t5x.cli.gin_files import parse_gin
    from spec_t5x.cli.settings import FIXED_GAMMA, Models
    from spec_t5x.generation import AUTO, GenerateOptions

    subject = importlib.import_module(SUBJECTS[args.subject])
    make, make_models, make_decoding = (
        gin.external_configurable(cls, module="spec_t5x")
        for cls in (subject.Options, Models, GenerateOptions)
    )
    parse_gin(args.gin_file, args.gin_bindings)
    options = make(**_flags_for(subject, args))
    models, decoding = make_models(), make_decoding()
    if decoding.gamma == AUTO:
        # What is measured is of a gamma; ``pacing`` says which it takes.
        decoding = dataclasses.replace(decoding, gamma=FIXED_GAMMA)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring")
        report = lambda done, total, what: bar.update(  # noqa: E731
            task, completed=done, total=total, description=what
        )
        for result in _results(subject.run(options, report, models=models, decoding=decoding)):
            # After every row: a long run that is cut short leaves what it has.
            if args.json:
                settings = _settings(options, models, decoding)
                _write_json(args.json, settings | subject.to_dict(result))
    print(subject.table(result))
    return 0


def _flags_for(subject: ModuleType, args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, all of which the subject must have."""
    given = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    fields = {field.name for field in dataclasses.fields(subject.Options)}
    for name in given:
        if name not in fields:
            raise InputError(
                f"--{name} is {given[name]}: the benchmark of {args.subject} has no such setting, "
                "leave it out"
            )
    return given


def _results(outcome: Any) -> Iterator[Any]:
    """The result, or all rows so far after each."""
    if not isinstance(outcome, Iterator):
        yield outcome
        return
    rows = []
    for row in outcome:
        rows.append(row)
        yield rows


def _settings(options: Any, models: Any, decoding: Any) -> dict[str, Any]:
    """Machine and settings of a run. Where files were is nobody else's business."""
    from spec_t5x.experiments.benchmark import machine

    values = dataclasses.asdict(options)
    for holder in (values, values.get("data")):
        for name in _PLACES:
            if isinstance(holder, dict) and isinstance(holder.get(name), str):
                holder[name] = Path(holder[name]).name
    names = {"target": Path(models.target).name, "draft": models.draft and Path(models.draft).name}
    return {
        "machine": machine(),
        "options": values | names,
        "decoding": dataclasses.asdict(decoding),
    }


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
