"""``spec-t5x acceptance``: acceptance rates of drafts, as a table."""

import argparse
import dataclasses

from spec_t5x.checkpoints.named_models import Models
from spec_t5x.cli import settings
from spec_t5x.labs.benchmark.options import AcceptanceOptions, TextSource
from spec_t5x.labs.commands import flags
from spec_t5x.names import NO_DRAFT

HELP = "measure acceptance rates (alpha) of drafts on text that the target generates"

_MODELS = settings.flags_of(Models) | {
    "draft": (["NAME_OR_DIR"], "draft, as in generate; repeatable (default: a packaged target's)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags. A flag that is left out takes its value from gin."""
    settings.add_text(parser)
    settings.add_gin(parser)
    settings.add_flags(parser.add_argument_group("models"), _MODELS)
    flags.add_texts(parser)
    settings.add_flags(
        parser.add_argument_group("measurement"), settings.flags_of(AcceptanceOptions)
    )
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measures acceptance, prints a table, and writes ``--json``; returns 0."""
    from spec_t5x.errors import InputError

    models, source, options = settings.configured(args, Models, TextSource, AcceptanceOptions)
    settings.check_no_task(args, source)
    if NO_DRAFT in (models.draft, *options.drafts):
        raise InputError(f"the draft is {NO_DRAFT}: give a draft to measure")
    if args.text and source.name:
        raise InputError(f"both TEXT and {source.name} were given: give one of them")
    if args.text:
        source.check_no_file("TEXT is given")
    elif source.name:
        from spec_t5x.labs.benchmark.text_source import check_readable

        check_readable(source)
    if models.draft and options.drafts:
        raise InputError(f"Models.draft is {models.draft} beside --draft: give one of them")
    names = options.drafts or (models.draft_name(),)

    from spec_t5x.checkpoints.loading import has_source
    from spec_t5x.checkpoints.make_draft import make_draft
    from spec_t5x.generation import Generator
    from spec_t5x.labs.benchmark import results
    from spec_t5x.labs.benchmark.acceptance import best, measure, table
    from spec_t5x.machine.compilation_cache import enable
    from spec_t5x.machine.progress import Progress

    # A decoder-only target generates from the empty prompt.
    if not args.text and source.name is None and has_source(models.target):
        raise InputError("there is no text: give TEXT, --data FILE or --mixture_or_task NAME")
    enable()
    draft_options = models.draft_options()
    opened, reader = Generator.open(models, names, options.standardizations()[0], *args.text)
    texts = args.text or _texts(source, options, reader)
    named = opened, draft_options.dtype, models.task, models.kv
    target, generator = Generator.load_target(*named, weights=models.weights)
    del opened, named  # They may hold all weights of an old file.
    drafts = {name: make_draft(name, target, generator.target, draft_options) for name in names}
    with Progress("tokens") as progress:
        rows = measure(generator, drafts, texts, options, progress.update)
    try:
        # Written before the table is printed, because standard output may fail.
        if args.json:
            shown = [
                dataclasses.asdict(row) | {"draft": results.without_folder(row.draft)}
                for row in rows
            ]
            results.save(args.json, shown, models=models, source=source, options=options)
    finally:
        results.show(*filter(None, (table(rows), best(rows))))
    return 0


def _texts(source, options, generator) -> list[str]:
    from spec_t5x.labs.benchmark.text_source import read_texts

    if source.name is None:
        # The empty prompt, after which the model generates unconditionally.
        return [""]
    # Every text gives at least one token, so as many texts as tokens are enough.
    return read_texts(source, generator, options.standardizations()[0], options.num_tokens)
