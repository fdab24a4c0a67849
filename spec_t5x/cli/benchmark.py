"""``spec-t5x benchmark``: speculative against plain decoding, as a table."""

import argparse

from spec_t5x.cli import settings

HELP = "measure speed-ups of drafts, verifiers, gammas and batch sizes against plain decoding"

_MODELS = {
    "target": ("NAME_OR_DIR", "as of generate; random:SIZE has random weights"),
    "vocabulary": ("FILE", "of a target that holds none"),
    "dtype": (("auto", "float32", "bfloat16"), "of the networks (auto)"),
}
_MEASUREMENT = {
    "gamma": ([settings.gamma], "drafts per iteration, or auto; once for each (4)"),
    "temperature": ([float], "0 is argmax; once for each (0 and 1)"),
    "batch_size": ([int], "inputs decoded together; once for each (1)"),
    "max_decode_len": ([int], "tokens generated at most; once for each (128)"),
    "num_inputs": (int, "texts to decode (60)"),
    "repeats": (int, "of all that is measured (5)"),
    "alpha": (float, "draw verdicts with this acceptance rate, for random sources, not texts"),
    "source_len": (int, "tokens of a random source (64)"),
    "table_2": (bool, "draw verdicts for the rows of the paper's Table 2"),
    "parts": (bool, "also time the parts of an iteration"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags. A flag that is left out takes its value from gin."""
    settings.add_gin(parser)
    models = parser.add_argument_group("models")
    settings.add_flags(models, _MODELS)
    models.add_argument(
        "--draft",
        action="append",
        dest="pairs",
        metavar="NAME[/VERIFIER]",
        help="as of generate, or random:SIZE; once for each (a packaged target's own)",
    )
    settings.add_texts(parser)
    settings.add_flags(parser.add_argument_group("measurement"), _MEASUREMENT)
    settings.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table, keeps the figures as JSON if asked to."""
    from spec_t5x.labs.benchmark import results, sweep
    from spec_t5x.labs.benchmark.reliability import caution
    from spec_t5x.labs.benchmark.text_source import TextSource
    from spec_t5x.machine.progress import Progress

    models, decoding, source, options = settings.read(args, TextSource, sweep.BenchmarkOptions)
    shown = {"models": models, "source": source, "options": options, "decoding": decoding}
    rows = []
    with Progress("rows", every=0) as progress:
        for row in sweep.run(
            options, progress.update, models=models, decoding=decoding, source=source
        ):
            rows.append(row)
            # After every row: a long run that is interrupted leaves what it has.
            if args.json:
                results.save(args.json, rows, **shown)
    table = sweep.table(rows) if rows else None
    parts = table, sweep.best(rows), caution(rows)
    results.show(*filter(None, parts))
    return 0
