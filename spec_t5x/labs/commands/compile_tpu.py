"""``spec-t5x compile-tpu``: compilation for a TPU on a machine without one."""

import argparse

from spec_t5x.cli import settings
from spec_t5x.labs.commands import flags
from spec_t5x.labs.tpu.options import Options, Workload

HELP = "compile for a TPU on a machine without one: memory, costs, predicted speed-up"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    settings.add_flags(parser, settings.flags_of(Options) | settings.flags_of(Workload))
    parser.add_argument(
        "--mesh",
        action="append",
        type=_mesh,
        dest="meshes",
        metavar="DATA,MODEL",
        help="chips of the data and of the model axis; repeatable (default: 1,1)",
    )
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compiles for each mesh, prints tables, and writes ``--json``; returns 0."""
    from spec_t5x.labs.benchmark.results import show
    from spec_t5x.labs.tpu import chips, compilation, tables

    chips.prepare_environment()
    work = Workload(**settings.given(args, Workload))
    options = Options(work=work, **settings.given(args, Options))
    results = []
    for result in compilation.run(options):
        results.append(result)
        try:
            # Written after every mesh, so that an interrupted run leaves its results.
            if args.json:
                compilation.write_json(args.json, options, results)
        finally:
            if len(results) == 1:
                show(tables.header(options))
            print()
            show(*tables.tables(result))
    return 0


def _mesh(text: str) -> tuple[int, int]:
    data, _, model = text.partition(",")
    try:
        return int(data), int(model)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give DATA,MODEL such as 1,4") from None
