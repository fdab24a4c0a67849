"""``spec-t5x evaluate``: quality and acceptance over a file of text pairs or a seqio task."""

import argparse
import functools
import json

from spec_t5x.cli import settings
from spec_t5x.labs.commands import flags

HELP = "compute BLEU or ROUGE, and acceptance, over a file of text pairs or a seqio task"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags. A flag that is left out takes its value from gin."""
    flags.add_texts(parser)
    metric = "metric for --data; bleu_intl is BLEU as T5 reports it (default: bleu)"
    settings.add_flags(parser, {"metric": (("bleu", "bleu_intl", "rouge"), metric)})
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Decodes the sources, prints a JSON object for the file or each task; returns 0."""
    from spec_t5x.labs.benchmark.options import TextSource

    models, options, source = settings.read(args, TextSource)
    # Checked before anything is loaded.
    models.draft_name()
    source.check_scored()
    settings.check_no_task(args, source)
    options = source.decoding(options)

    from spec_t5x.generation import Generator
    from spec_t5x.labs.benchmark.evaluation import check_options, check_texts, evaluate
    from spec_t5x.labs.benchmark.text_source import read_sets, warn_of_skipped
    from spec_t5x.machine.compilation_cache import enable
    from spec_t5x.machine.progress import Progress

    check_options(options)
    enable()
    # Read before the target's weights are, which takes minutes for a large one.
    sets = read_sets(source, None) if source.data else None
    target, opened = Generator.open(models, [models.draft_name()], options)
    sets = sets or read_sets(source, opened.vocabulary)
    for texts in sets:
        check_texts(opened, texts, options)
    generator = Generator.load_named(models, target)
    del target  # It may hold all weights of an old file.
    for texts in sets:
        title = f"evaluating {texts.name}"
        with Progress("inputs") as progress:
            report = functools.partial(progress.update, text=title)
            evaluation = evaluate(generator, texts, options, report)
        skipped = evaluation.num_skipped
        warn_of_skipped(skipped, evaluation.num_pairs + skipped, texts.name)
        task = {} if source.data else {"task": texts.name, "split": source.split}
        print(json.dumps(task | evaluation.to_dict(), indent=2))
    return 0
