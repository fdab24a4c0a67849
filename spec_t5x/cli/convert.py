"""``spec-t5x convert``: a checkpoint of T5X, Hugging Face or our own, as one of another."""

import argparse
import json

from spec_t5x.errors import InputError

HELP = "convert a checkpoint between T5X, Hugging Face and the project's own format"

# Spelt out, so that the parser needs no JAX; ``checkpoints.convert.WRITERS``.
_FORMATS = ("t5x", "huggingface", "native")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a checkpoint's directory, gs://… for T5X's, or the name of a packaged model",
    )
    parser.add_argument(
        "destination",
        metavar="DESTINATION",
        help="a directory to write; for t5x it ends in checkpoint_STEP",
    )
    parser.add_argument("--to", required=True, choices=_FORMATS, help="the format to write")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the stored weights (the source's)"
    )
    parser.add_argument(
        "--vocabulary",
        metavar="FILE",
        help="of a T5X checkpoint, which has none: a SentencePiece model, FILE:100 with 100 extra "
        "ids, bytes, or another checkpoint",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier checkpoint")


def run(args: argparse.Namespace) -> int:
    """Converts, with a bar on a terminal, and prints one JSON object about the model."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn

    from spec_t5x.checkpoints.convert import convert
    from spec_t5x.checkpoints.storage.files import one_line

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("converting", total=None)
        try:
            stored = convert(
                args.source,
                args.destination,
                to=args.to,
                dtype=args.dtype,
                vocabulary=args.vocabulary,
                overwrite=args.overwrite,
                report=lambda done, total: bar.update(task, completed=done, total=total),
            )
        except OSError as error:
            raise InputError(
                f"cannot write {args.destination} ({one_line(error)}): choose another directory "
                "or make room"
            ) from error
    print(
        json.dumps(
            {
                "source": str(stored.directory),
                "destination": args.destination,
                "format": args.to,
                "model": stored.config.to_dict(),
            },
            indent=2,
        )
    )
    return 0
