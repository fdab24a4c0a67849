"""``spec-t5x compile-tpu``: compilation for a TPU on a machine without one."""

import argparse

from spec_t5x.cli import settings
from spec_t5x.names import KV, WEIGHTS

HELP = "compile for a TPU on a machine without one: memory, costs, predicted speed-up"

_FLAGS = {
    "topology": (
        "CHIP:LAYOUT",
        "TPU slice of v4, v5e, v5p or v6e, such as v6e:2x2 (default: v4:2x2x1)",
    ),
    "target": ("SIZE", "published size of the target (default: t5_1_1_xxl)"),
    "weights": (WEIGHTS, "type of the target's weights; auto is bfloat16 (default: auto)"),
    "kv": (KV, "type of the source's keys and values; auto is bfloat16 (default: auto)"),
    "draft": (
        ["SIZE"],
        "published size of the draft; or int8 or int4 (the target's weights rounded), eagle or "
        "eagle:WIDTH (a head); repeatable (default: t5_1_1_small)",
    ),
    "gamma": (int, "tokens proposed in an iteration, or a tree's depth (default: 7)"),
    "verifier": (
        ("token", "block", "multi", "tree"),
        "verifier; multi and tree are of trees, which transformers and heads propose "
        "(default: block)",
    ),
    "widths": (
        [tuple, "widths"],
        "with verifier multi or tree, number of tokens to propose at each position, such as 3,2; "
        "repeatable",
    ),
    "block_efficiency": (
        [float, "block_efficiencies"],
        "tokens per target call to predict a tree's speed-up for; repeatable (default: 2.5, 3, "
        "3.5, 4 and 4.5)",
    ),
    "steps_only": (bool, "leave out the whole loops and their memory, which takes minutes less"),
    "batch": (int, "rows of the batch, over all replicas (default: 1)"),
    "source_len": (int, "length of the source in tokens (default: 512)"),
    "max_decode_len": (int, "maximum length of the output in tokens (default: 128)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    settings.add_flags(parser, _FLAGS)
    parser.add_argument(
        "--mesh",
        action="append",
        type=_mesh,
        dest="meshes",
        metavar="DATA,MODEL",
        help="chips of the data and of the model axis; repeatable (default: 1,1)",
    )
    settings.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compiles for each mesh, prints tables, and writes ``--json``; returns 0."""
    from spec_t5x.labs.benchmark.results import show
    from spec_t5x.labs.tpu import chips, compilation, tables
    from spec_t5x.labs.tpu.options import Options
    from spec_t5x.labs.tpu.programs import Workload

    chips.prepare_environment()
    work = Workload(**settings.given(args, Workload))
    options = Options(work=work, **settings.given(args, Options))
    results = []
    for result in compilation.run(options):
        results.append(result)
        # Written after every mesh, so that an interrupted run leaves its results.
        if args.json:
            compilation.write_json(args.json, options, results)
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
