"""``spec-t5x acceptance``: how often the target accepts its drafts, as a table."""

import argparse
import dataclasses
from pathlib import Path

from spec_t5x.cli import settings

HELP = "measure acceptance rates (alpha) of drafts on text that the target generates"

# Flags that may be given several times, and the options that they fill.
_LISTS = {
    "temperature": ("temperatures", float, "0 is argmax; once for each (0 and 1)"),
    "top_k": ("top_ks", int, "sample from the k likeliest tokens, 0 from all; once for each"),
    "top_p": ("top_ps", float, "sample from the nucleus of this mass, 0 from all; once for each"),
    "lenience": ("leniences", float, "l of section A.5, 1 is lossless; once for each (1)"),
}
_NUMBERS = {
    "num_tokens": (int, "tokens that the target generates, for each distribution (10000)"),
    "max_decode_len": (int, "of each text at most (128)"),
    "batch_size": (int, "texts generated together (16)"),
    "seed": (int, "of the random draws (0)"),
    "confidence": (float, "of the intervals (0.95)"),
    "decoded_texts": (int, "texts that are also decoded with each draft; 0 for none (64)"),
    "gamma": (int, "drafts per iteration there (7)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags. A flag that is left out takes its value from gin."""
    parser.add_argument("text", nargs="*", metavar="TEXT", help="an input; more are more inputs")
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE")
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="NAME_OR_DIR", help="checkpoint that generates")
    models.add_argument("--vocabulary", metavar="FILE", help="of a target that holds none")
    models.add_argument(
        "--draft",
        action="append",
        dest="drafts",
        metavar="NAME_OR_DIR",
        help="as of generate; more are scored in one pass",
    )
    settings.add_inputs(parser)
    measured = parser.add_argument_group("measurement")
    for name, (field, kind, text) in _LISTS.items():
        measured.add_argument(
            f"--{name}", action="append", type=kind, dest=field, metavar="N", help=text
        )
    for name, (kind, text) in _NUMBERS.items():
        measured.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    for name, text in {
        "decode_leniently": "decode at leniences below 1, too",
        "truncate": "cut longer inputs",
    }.items():
        measured.add_argument(f"--{name}", action="store_true", default=None, help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures there")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a Markdown table, keeps the figures as JSON if asked to."""
    import gin

    from spec_t5x.cli.gin_files import parse_gin
    from spec_t5x.cli.settings import NO_DRAFT, Models
    from spec_t5x.errors import InputError
    from spec_t5x.experiments import acceptance, acceptance_run

    configurables = [Models, acceptance_run.AcceptanceRun, acceptance.AcceptanceOptions]
    makers = [gin.external_configurable(each, module="spec_t5x") for each in configurables]
    parse_gin(args.gin_file, args.gin_bindings)
    # Checked before anything is loaded.
    models, chosen, options = (
        make(**_given(args, cls)) for make, cls in zip(makers, configurables, strict=True)
    )
    if args.json and args.json.is_dir():
        raise InputError(f"--json {args.json} is a folder: give a file")
    if models.draft == NO_DRAFT and not chosen.drafts:
        raise InputError(f"the draft is {NO_DRAFT}: give one to measure")
    if not chosen.drafts:
        chosen = dataclasses.replace(chosen, drafts=(models.draft_name(),))

    from rich.console import Console
    from rich.progress import Progress

    from spec_t5x.checkpoints.loading import load
    from spec_t5x.machine.compilation_cache import enable

    enable()
    draft_options = models.draft_options()
    target = load(models.target, dtype=draft_options.dtype, vocabulary=models.vocabulary)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring")
        report = lambda done, total, what: bar.update(  # noqa: E731
            task, completed=done, total=total, description=what
        )
        rows = acceptance_run.run(chosen, options, target, args.text, draft_options, report)
    print(acceptance.table(rows))
    if args.json:
        acceptance_run.write_json(args.json, chosen, options, target, rows)
    return 0


def _given(args: argparse.Namespace, cls: type) -> dict:
    """The options of a class that flags were given for."""
    names = [field.name for field in dataclasses.fields(cls)]
    given = {n: getattr(args, n) for n in names if getattr(args, n, None) is not None}
    # Flags that may be given several times.
    return {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
