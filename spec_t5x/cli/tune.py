"""``spec-t5x tune``: the draft, gamma and batch size that are fastest on this device."""

import argparse
import dataclasses
from pathlib import Path

from spec_t5x.cli import settings

HELP = "find the fastest draft, gamma and batch size for your device, models and inputs"

# Flags that may be given several times, and the options that they fill.
_LISTS = {
    "draft": ("drafts", str, "NAME_OR_DIR", "as of generate; once for each to try"),
    "batch_size": ("batch_sizes", int, "N", "inputs decoded together; once for each to try (1)"),
}
_MEASUREMENT = {
    "budget": (float, "seconds of timing for each batch size; compiling is on top (20)"),
    "num_inputs": (int, "inputs to measure acceptance on at most (32)"),
    "max_gamma": (int, "largest gamma to look at (15)"),
    "confidence": (float, "of the intervals (0.95)"),
    "margin": (float, "by how much speculation must surely be faster to be chosen (0.05)"),
    "repeats": (int, "of what --measure decodes (5)"),
}
_DECODING = {
    "temperature": (float, "0 is argmax (0)"),
    "top_k": (int, "sample from the k likeliest tokens; 0 from all (0)"),
    "top_p": (float, "sample from the nucleus of this mass; 0 from all (0)"),
    "num_decodes": (int, "outputs for each input (1)"),
    "seed": (int, "of the random draws (0)"),
    "max_decode_len": (int, "tokens generated at most (128)"),
    "max_source_len": (int, "longest input in tokens (the checkpoint's)"),
    "lenience": (float, "below 1 the token verifier is lossy (1)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags. A flag that is left out takes its value from gin."""
    parser.add_argument("text", nargs="*", metavar="TEXT", help="an input; more are more inputs")
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE")
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="NAME_OR_DIR", help="checkpoint whose output is wanted")
    models.add_argument("--vocabulary", metavar="FILE", help="of a target that holds none")
    models.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), help="what the networks compute in"
    )
    settings.add_inputs(parser)
    tried = parser.add_argument_group("what is tried")
    for name, (field, kind, metavar, text) in _LISTS.items():
        tried.add_argument(
            f"--{name}", action="append", type=kind, dest=field, metavar=metavar, help=text
        )
    for name, (kind, text) in _MEASUREMENT.items():
        tried.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    decoding = parser.add_argument_group("decoding")
    for name, (kind, text) in _DECODING.items():
        decoding.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    decoding.add_argument("--verifier", metavar="NAME", help="which drafts to keep (block)")
    decoding.add_argument("--truncate", action="store_true", default=None, help="cut longer inputs")
    shown = parser.add_argument_group("output")
    shown.add_argument(
        "--measure",
        action="store_true",
        default=None,
        help="also decode with the best gamma of each draft, and print both",
    )
    shown.add_argument("--output", type=Path, metavar="FILE", help="write the best as a gin file")
    shown.add_argument("--json", type=Path, metavar="FILE", help="keep all figures there")


def run(args: argparse.Namespace) -> int:
    """Tunes, prints Markdown tables, and keeps the best if asked to."""
    import gin

    from spec_t5x.cli.settings import NO_DRAFT, Models
    from spec_t5x.errors import InputError
    from spec_t5x.experiments import tune_run
    from spec_t5x.generation import GenerateOptions
    from spec_t5x.gin_files import parse_gin

    configurables = [Models, tune_run.TuneRun, GenerateOptions]
    makers = [gin.external_configurable(each, module="spec_t5x") for each in configurables]
    parse_gin(args.gin_file, args.gin_bindings)
    # Checked before anything is loaded.
    models, chosen, options = (
        make(**_given(args, cls)) for make, cls in zip(makers, configurables, strict=True)
    )
    for name in ("json", "output"):
        path = getattr(args, name)
        if path and path.is_dir():
            raise InputError(f"--{name} {path} is a folder: give a file")
    if models.adaptive is not None:
        raise InputError(
            f"adaptive is {models.adaptive:g}: tune looks for a gamma that stays, leave it out"
        )
    if not chosen.drafts:
        if models.draft == NO_DRAFT:
            raise InputError(f"the draft is {NO_DRAFT}: give at least one to try")
        chosen = dataclasses.replace(chosen, drafts=(models.draft_name(),))
    if not args.text:
        chosen.check_given()

    from rich.console import Console
    from rich.progress import Progress

    from spec_t5x.checkpoints.loading import load
    from spec_t5x.compilation_cache import enable

    enable()
    draft_options = models.draft_options()
    target = load(models.target, dtype=draft_options.dtype, vocabulary=models.vocabulary)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring")
        report = lambda done, total, what: bar.update(  # noqa: E731
            task, completed=done, total=total, description=what
        )
        result = tune_run.run(chosen, options, target, args.text, draft_options, report)
    print(f"{tune_run.table(result)}\n\nPredicted, by gamma:\n\n{tune_run.curves(result)}")
    if args.output:
        _write(args.output, tune_run.gin_text(result, _bound(models), options))
    if args.json:
        import json

        _write(args.json, json.dumps(tune_run.to_dict(result), indent=2) + "\n")
    return 0


def _bound(models) -> dict:
    """What a gin file says of the models: the target, and all that is not as usual."""
    from spec_t5x.cli.settings import NO_DRAFT

    # The draft's argument is part of the names that were tried.
    left_out = ("draft", "draft_argument")
    values = {
        field.name: getattr(models, field.name)
        for field in dataclasses.fields(models)
        if field.name not in left_out
        and (field.name == "target" or getattr(models, field.name) != field.default)
    }
    return values | {"draft": NO_DRAFT, "draft_argument": None}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _given(args: argparse.Namespace, cls: type) -> dict:
    """The options of a class that flags were given for."""
    names = [field.name for field in dataclasses.fields(cls)]
    given = {n: getattr(args, n) for n in names if getattr(args, n, None) is not None}
    # Flags that may be given several times.
    return {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
