"""``spec-t5x benchmark``: speculative against plain decoding, as a table."""

import argparse

from spec_t5x.checkpoints.named_models import Models
from spec_t5x.cli import settings
from spec_t5x.labs.benchmark.options import BenchmarkOptions, TextSource
from spec_t5x.labs.commands import flags

HELP = "measure speed-ups of drafts, verifiers, gammas and batch sizes against plain decoding"

_MODELS = settings.flags_of(Models) | {
    "target": ("NAME_OR_DIR", "target, as in generate, or random:SIZE for random weights"),
    "draft": (
        ["NAME[/VERIFIER]", "pairs"],
        "draft, as in generate, or random:SIZE, and after a slash a verifier other than block, as "
        "in eagle/tree; repeatable (default: a packaged target's own)",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags. A flag that is left out takes its value from gin."""
    settings.add_gin(parser)
    settings.add_flags(parser.add_argument_group("models"), _MODELS)
    flags.add_texts(parser)
    settings.add_flags(
        parser.add_argument_group("measurement"), settings.flags_of(BenchmarkOptions)
    )
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measures speed-ups, prints a table, and writes ``--json``; returns 0."""
    from spec_t5x.errors import InputError
    from spec_t5x.labs.benchmark import results, sweep
    from spec_t5x.labs.benchmark.reliability import caution
    from spec_t5x.machine.progress import Progress

    models, decoding, source, options = settings.read(args, TextSource, BenchmarkOptions)
    settings.check_no_task(args, source)
    shown = {"models": models, "source": source, "options": options, "decoding": decoding}
    rows = []
    try:
        with Progress("rows", every=0) as progress:
            for row in sweep.run(
                options, progress.update, models=models, decoding=decoding, source=source
            ):
                rows.append(row)
                # Written after every row, so that an interrupted run leaves its results.
                if args.json:
                    results.save(args.json, rows, **shown)
    except InputError:
        # A later row failed: the earlier ones are shown.
        if rows:
            results.show(sweep.table(rows))
        raise
    table = sweep.table(rows) if rows else None
    parts = table, sweep.best(rows), caution(rows)
    results.show(*filter(None, parts))
    return 0
