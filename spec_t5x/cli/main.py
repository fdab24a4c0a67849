"""Entry point of ``spec-t5x``: picks the command, turns mistakes into one line."""

import argparse
import os
import sys
from collections.abc import Sequence

from spec_t5x import xla_flags
from spec_t5x.errors import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Exit status 0, or 2 for a mistake of the user's."""
    arguments = sys.argv[1:] if arguments is None else arguments
    bindings = [item for item in arguments if item.startswith("--gin.")]
    # Taken out first: argparse would read one that holds a space as a TEXT.
    args, rest = _parser().parse_known_args([a for a in arguments if a not in bindings])
    args.gin_bindings = bindings
    xla_flags.apply()
    try:
        _check_known(rest, args.command)
        if args.gin_search_paths:
            from spec_t5x.gin_files import add_search_paths

            add_search_paths(args.gin_search_paths)
        return args.run(args)
    except InputError as error:
        if args.debug:
            raise
        # gin appends lines about its own calls to an error that passes through it.
        print(f"spec-t5x: error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has left; nothing more is owed to anyone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage before it."""

    def error(self, message: str):
        self.exit(2, f"spec-t5x: error: {message}: see {self.prog} --help\n")


def _check_known(rest: list[str], command: str) -> None:
    if rest:
        raise InputError(f"unknown argument {rest[0]!r}: see spec-t5x {command} --help")


def _parser() -> argparse.ArgumentParser:
    from spec_t5x.cli import (
        acceptance,
        benchmark,
        compile_tpu,
        convert,
        distill,
        evaluate,
        generate,
        infer,
        reproduce,
        synthetic,
        train,
        train_heads,
        train_lm,
        train_ngram,
        tune,
    )

    parser = _Parser(
        prog="spec-t5x",
        description="Lossless speculative decoding of encoder-decoder T5 models.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (
        generate,
        infer,
        evaluate,
        acceptance,
        benchmark,
        tune,
        train,
        distill,
        train_heads,
        train_lm,
        train_ngram,
        convert,
        compile_tpu,
        reproduce,
        synthetic,
    ):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        command.add_argument(
            "--gin_search_paths",
            type=lambda text: [path for path in text.split(",") if path],
            default=[],
            metavar="DIR,DIR",
            help="where else to look for gin files",
        )
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
