"""``spec-t5x benchmark``: speculative against plain decoding, as a table."""

import argparse
from pathlib import Path

from spec_t5x.cli import measurements, settings

HELP = "measure speed-ups of drafts, verifiers, gammas and batch sizes against plain decoding"

_LISTS = {
    "gamma": ("gammas", settings.gamma, "drafts per iteration, or auto; once for each (4)"),
    "temperature": ("temperatures", float, "0 is argmax; once for each (0 and 1)"),
    "batch_size": ("batch_sizes", int, "inputs decoded together; once for each (1)"),
    "max_decode_len": ("max_decode_lens", int, "tokens generated at most; once for each (128)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags. A flag that is left out takes its value from gin."""
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE")
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target", metavar="NAME_OR_DIR", help="as of generate; random:SIZE has random weights"
    )
    models.add_argument("--vocabulary", metavar="FILE", help="of a target that holds none")
    models.add_argument(
        "--draft",
        action="append",
        dest="pairs",
        metavar="NAME[/VERIFIER]",
        help="as of generate, or random:SIZE; once for each (a packaged target's own)",
    )
    models.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), help="of the networks (auto)"
    )
    measurements.add_texts(parser)
    parser.add_argument("--num_inputs", type=int, metavar="N", help="texts to decode (60)")
    measured = parser.add_argument_group("measurement")
    measurements.add_lists(measured, _LISTS)
    numbers = {
        "repeats": (int, "of all that is measured (5)"),
        "alpha": (float, "draw verdicts with this acceptance rate, for random sources, not texts"),
        "source_len": (int, "tokens of a random source (64)"),
    }
    for name, (kind, text) in numbers.items():
        measured.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    switches = {
        "table_2": "draw verdicts for the rows of the paper's Table 2",
        "parts": "also time the parts of an iteration",
    }
    for name, text in switches.items():
        measured.add_argument(f"--{name}", action="store_true", default=None, help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures there")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a Markdown table, keeps the figures as JSON if asked to."""
    from spec_t5x.experiments import benchmark, results
    from spec_t5x.experiments.text_source import TextSource

    models, decoding, source, options = settings.read(args, TextSource, benchmark.BenchmarkOptions)
    shown = {"models": models, "source": source, "options": options, "decoding": decoding}
    rows = []
    with measurements.progress("measuring") as report:
        for row in benchmark.run(options, report, models=models, decoding=decoding, source=source):
            rows.append(row)
            # After every row: a long run that is interrupted leaves what it has.
            if args.json:
                results.save(args.json, rows, **shown)
    print(benchmark.table(rows))
    return 0
