"""``spec-t5x acceptance``: how often the target accepts its drafts, as a table."""

import argparse
from pathlib import Path

from spec_t5x.cli import measurements, settings

HELP = "measure acceptance rates (alpha) of drafts on text that the target generates"

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
    measurements.add_texts(parser)
    measured = parser.add_argument_group("measurement")
    measurements.add_lists(measured, _LISTS)
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
    from spec_t5x.cli.settings import NO_DRAFT
    from spec_t5x.errors import InputError
    from spec_t5x.experiments.acceptance import AcceptanceOptions
    from spec_t5x.experiments.text_source import TextSource

    models, _, source, options = settings.read(args, TextSource, AcceptanceOptions)
    # Checked before anything is loaded.
    if args.json and args.json.is_dir():
        raise InputError(f"--json {args.json} is a folder: give a file")
    if models.draft == NO_DRAFT and not options.drafts:
        raise InputError(f"the draft is {NO_DRAFT}: give one to measure")
    if args.text and source.name:
        raise InputError(f"both TEXT and {source.name} were given: give one of them")
    names = options.drafts or (models.draft_name(),)

    from spec_t5x.checkpoints.loading import load
    from spec_t5x.checkpoints.make_draft import make_draft
    from spec_t5x.experiments import results
    from spec_t5x.experiments.acceptance import measure, table
    from spec_t5x.experiments.benchmark import generator_of
    from spec_t5x.machine.compilation_cache import enable

    enable()
    draft_options = models.draft_options()
    target = load(models.target, dtype=draft_options.dtype, vocabulary=models.vocabulary)
    generator = generator_of(target)
    texts = args.text or _texts(source, options, generator)
    drafts = {name: make_draft(name, target, generator.target, draft_options) for name in names}
    with measurements.progress("measuring") as report:
        rows = measure(generator, drafts, texts, options, report)
    print(table(rows))
    if args.json:
        shown = [row.to_dict() | {"draft": results.without_folder(row.draft)} for row in rows]
        results.save(args.json, shown, models=models, source=source, options=options)
    return 0


def _texts(source, options, generator) -> list[str]:
    from spec_t5x.experiments.text_source import read_texts

    if source.name is None and generator.is_decoder_only:
        # Unconditional text.
        return [""]
    # A text gives at least a token: no more texts can be needed.
    return read_texts(source, generator, options.standardizations()[0], options.num_tokens)
