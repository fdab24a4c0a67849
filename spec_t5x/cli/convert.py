"""``spec-t5x convert``: a checkpoint of one format written in another."""

import argparse
import functools
import json

from spec_t5x.checkpoints.named_models import Models
from spec_t5x.cli import settings
from spec_t5x.names import AUTO, NATIVE_DTYPES, WEIGHTS

HELP = "convert a checkpoint between the formats of T5X, Hugging Face and this package (native)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="checkpoint to read: a directory, gs://… (T5X), OWNER/NAME on the Hugging Face Hub, "
        "or a packaged model",
    )
    parser.add_argument(
        "destination",
        metavar="DESTINATION",
        help="directory to write; with --to t5x its name ends in checkpoint_STEP",
    )
    text = "format to write: t5x, t5x_scanned, huggingface, native, or one of contrib"
    parser.add_argument("--to", required=True, metavar="FORMAT", help=text)
    text = "type of the stored weights (default: bfloat16 if all of the source's are, else float32)"
    flags = {
        "dtype": (NATIVE_DTYPES, text),
        "weights": (WEIGHTS, "int8 and int4 round the matrices (native only) (default: auto)"),
        **settings.flags_of(Models, "vocabulary"),
        "overwrite": (bool, "replace an existing checkpoint"),
    }
    settings.add_flags(parser, flags)


def run(args: argparse.Namespace) -> int:
    """Converts a checkpoint, prints a JSON object with the model's configuration; returns 0."""
    from spec_t5x.checkpoints.convert import convert
    from spec_t5x.machine.progress import Progress

    with Progress("bytes") as progress:
        stored = convert(
            args.source,
            args.destination,
            to=args.to,
            dtype=args.dtype,
            weights=args.weights or AUTO,
            vocabulary=args.vocabulary,
            overwrite=bool(args.overwrite),
            report=functools.partial(progress.update, text="converting"),
        )
    shown = {"source": str(stored.directory), "destination": args.destination, "format": args.to}
    print(json.dumps(shown | {"model": stored.config.to_dict()}, indent=2))
    return 0
