"""``spec-t5x benchmark``: drafts and verifiers against plain decoding, as a table."""

import argparse
from pathlib import Path

HELP = "measure drafts and verifiers against plain decoding"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags; all else is gin's."""
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE")
    parser.add_argument("--data", metavar="FILE", help="pairs, .tsv or .jsonl, gzipped or not")
    parser.add_argument("--mixture_or_task", metavar="NAME", help="seqio's name, instead of a file")
    parser.add_argument("--split", metavar="NAME", help="of the task (validation)")
    parser.add_argument("--num_inputs", type=int, metavar="N", help="inputs to decode (60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures there")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a Markdown table, keeps the figures as JSON if asked to."""
    import gin
    from rich.console import Console
    from rich.progress import Progress

    from spec_t5x.checkpoints.loading import load
    from spec_t5x.cli.settings import Models
    from spec_t5x.experiments import benchmark
    from spec_t5x.generation import GenerateOptions
    from spec_t5x.gin_files import parse_gin

    make = gin.external_configurable(benchmark.BenchmarkOptions, module="spec_t5x")
    make_models = gin.external_configurable(Models, module="spec_t5x")
    make_decoding = gin.external_configurable(GenerateOptions, module="spec_t5x")
    parse_gin(args.gin_file, args.gin_bindings)
    names = ("data", "mixture_or_task", "split", "num_inputs")
    options = make(**{n: getattr(args, n) for n in names if getattr(args, n) is not None})
    models = make_models()
    draft = models.draft_name() if options.uses_own_draft else None
    draft_options = models.draft_options()
    target = load(models.target, dtype=draft_options.dtype, vocabulary=models.vocabulary)
    console = Console(stderr=True)
    rows = []
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring")
        report = lambda done, total, what: bar.update(  # noqa: E731
            task, completed=done, total=total, description=what
        )
        for row in benchmark.run(options, target, draft, draft_options, make_decoding(), report):
            rows.append(row)
            # After every row: a long run that is cut short leaves what it has.
            if args.json:
                benchmark.write_json(args.json, options, target, rows)
    print(benchmark.table(rows))
    return 0
