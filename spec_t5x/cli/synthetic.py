"""``spec-t5x synthetic``: Table 2 at real size with random weights and drawn verdicts."""

import argparse
from pathlib import Path

from spec_t5x.errors import InputError

HELP = "time real sizes with random weights at given acceptance rates (never text)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags. A flag that is left out takes its value from gin."""
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE")
    parser.add_argument("--target", metavar="SIZE", help="a published size (t5_1_1_xxl)")
    parser.add_argument(
        "--draft",
        dest="drafts",
        action="append",
        metavar="SIZE",
        help="a published size; give it again for more (t5_1_1_small, _base and _large)",
    )
    numbers = {
        "alpha": (float, "acceptance rate of every draft (the paper's rows)"),
        "gamma": (int, "with --alpha: drafts in an iteration (7)"),
        "temperature": (float, "with --alpha: 0 is argmax (0)"),
        "source_len": (int, "encoder length (512)"),
        "decode_len": (int, "tokens generated (128)"),
        "repeats": (int, "decodes of each kind, in turn (9)"),
        "seed": (int, "of weights and verdicts (0)"),
    }
    for name, (kind, text) in numbers.items():
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="of weights and networks; auto is float32 on a CPU, else bfloat16 (auto)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures there")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a Markdown table, keeps the figures as JSON if asked to."""
    import dataclasses

    import gin
    from rich.console import Console

    from spec_t5x.cli.gin_files import parse_gin
    from spec_t5x.experiments import synthetic_acceptance

    cls = synthetic_acceptance.SyntheticOptions
    make = gin.external_configurable(cls, module="spec_t5x")
    parse_gin(args.gin_file, args.gin_bindings)
    names = [field.name for field in dataclasses.fields(cls)]
    options = make(**{n: getattr(args, n) for n in names if getattr(args, n, None) is not None})
    if args.json and not args.json.absolute().parent.is_dir():
        raise InputError(f"--json {args.json}: no such folder: make it first")
    timings = []
    with Console(stderr=True).status("making weights") as status:
        report = lambda done, total, what: status.update(  # noqa: E731
            f"{done + 1} of {total}: {what}"
        )
        for timing in synthetic_acceptance.run(options, report):
            timings.append(timing)
            # After every row: a long run that is cut short leaves what it has.
            if args.json:
                synthetic_acceptance.write_json(args.json, options, timings)
    print(synthetic_acceptance.table(timings))
    return 0
