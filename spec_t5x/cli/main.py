"""Entry point of ``spec-t5x``: runs a command and prints an ``InputError`` as one line."""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from errno import EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, EPERM, EROFS
from typing import Any

import spec_t5x
from spec_t5x.cli import settings, standard_streams
from spec_t5x.errors import InputError, did_you_mean, is_out_of_memory, one_line
from spec_t5x.inference.signals import stopping
from spec_t5x.machine import extras, xla_flags
from spec_t5x.machine.accelerators import fault_of
from spec_t5x.names import hint_for

# Parent of the loggers of all modules.
log = logging.getLogger("spec_t5x")

# Errors about a path that the system does not look up or open.
_OF_A_PATH = {EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, EPERM, EROFS}
# Verbs before the name of an option in an error's remedy.
_VERBS = "give|leave|lower|pass|raise|set"
# Modules by command, in the order of ``--help``; each has ``HELP``, ``add_arguments`` and ``run``.
_COMMANDS = {
    "generate": "cli.generate",
    "demo": "labs.commands.demo",
    "infer": "cli.infer",
    "evaluate": "labs.commands.evaluate",
    "acceptance": "labs.commands.acceptance",
    "benchmark": "labs.commands.benchmark",
    # ``TRAININGS`` has these two, and the commands that ``contrib`` registers.
    "train": "labs.commands.train",
    "distill": "labs.commands.train",
    "train-ngram": "labs.commands.train_ngram",
    "convert": "cli.convert",
    "compile-tpu": "labs.commands.compile_tpu",
    "reproduce": "labs.commands.reproduce",
    "doctor": "labs.commands.doctor",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``arguments`` (None: the command line's); returns the exit status, 2 for an error."""
    given = sys.argv[1:] if arguments is None else arguments
    status = standard_streams.guarded(functools.partial(_main, given))
    if status == standard_streams.INTERRUPTED and arguments is None:
        # Threads of TensorFlow that are still reading crash at the interpreter's usual end.
        os._exit(status)
    return status


def _main(arguments: Sequence[str]) -> int:
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        # Answers a shell that completes a line, and exits.
        argcomplete.autocomplete(parser)
    # Removed first, because argparse would read a binding with a space as a TEXT.
    bindings = [item for item in arguments if item.startswith("--gin.")]
    args, rest = parser.parse_known_args([a for a in arguments if a not in bindings])
    args.gin_bindings = bindings
    # TensorFlow, of tasks and curves, warns that it finds no GPU; 2.21 does so all the same.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _shown_log(args):
        return _run(args, rest)


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    try:
        xla_flags.apply()
        if args.gin_bindings and "gin_file" not in args:
            raise InputError(
                f"{args.command} reads no gin settings: leave out {args.gin_bindings[0]}, or see "
                f"its flags in spec-t5x {args.command} --help"
            )
        if rest:
            name = rest[0].partition("=")[0]
            hint = hint_for(name.lstrip("-"), args.flags).replace("is '", "is '--")
            hint = hint or did_you_mean(name, [f"--{flag}" for flag in args.flags])
            see = f"see spec-t5x {args.command} --help"
            raise InputError(f"unknown argument {rest[0]!r}{hint}: {see}")
        if getattr(args, "gin_search_paths", ()):
            from spec_t5x.cli.gin_files import add_search_paths

            add_search_paths(args.gin_search_paths)
        with stopping([signal.SIGINT]):
            return args.run(args)
    except Exception as error:
        if args.debug or (line := _line(error, args.flags)) is None:
            raise
        log.error(f"error: {line}")
        return 2


def _line(error: Exception, flags: Collection[str]) -> str | None:
    """Returns the line that reports an error with a known remedy; None for another error."""
    if isinstance(error, InputError):
        # gin appends lines about its own calls to an error that passes through it.
        return str(error).splitlines()[0]
    if isinstance(error, OSError) and error.errno in _OF_A_PATH and error.filename is not None:
        return f"cannot use {one_line(error.filename, 80)} ({error.strerror}): give another path"
    # JAX checks its variables when it is imported, of which its inner packages are left then.
    if isinstance(error, ValueError) and "jax" not in sys.modules and "jax._src" in sys.modules:
        return f"JAX cannot be imported ({one_line(error)}): mend that variable, JAX_…"
    if (fault := fault_of(error)) or not is_out_of_memory(error):
        return fault
    narrower = ", or --dtype bfloat16" if "dtype" in flags else ""
    parallel = ", or a larger --model_parallel" if "model_parallel" in flags else ""
    full = "the device's memory is full: give smaller batches, shorter texts or a smaller model"
    return f"{full}{narrower}{parallel}"


class _Parser(argparse.ArgumentParser):
    """Parser that reports a mistake in one line, without the usage before it."""

    def __init__(self, **options):
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str):
        if match := re.search(r"(\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            name, value, choices = match[1], match[2], re.findall(r"[\w-]+", match[3])
            hint = did_you_mean(value, choices) or f": choose from {', '.join(choices)}"
            message = f"{f'{name} is' if name[0] == '-' else 'there is no'} {value!r}{hint}"
            if value in _COMMANDS and self.prog == "spec-t5x":
                message = f"{value} {settings.NO_LABS}"
        self.exit(2, f"spec-t5x: error: {message}: see {self.prog} --help\n")


def _print(args: argparse.Namespace, record: logging.LogRecord) -> None:
    message = record.getMessage()
    if record.levelno >= logging.WARNING:
        start = re.match(r"(error: |\w+ \d+: )?", message).end()
        message = message[:start] + _spoken(message[start:], args)
    standard_streams.complain(message)


@contextlib.contextmanager
def _shown_log(args: argparse.Namespace) -> Iterator[None]:
    """Writes log records of ``args.log_level`` and above to standard error within the ``with``."""
    before, handler = (log.level, log.propagate), logging.Handler()
    handler.emit = functools.partial(_print, args)
    log.addHandler(handler)
    log.setLevel(args.log_level)
    # Imported libraries may have handlers on the root logger, which would repeat the records.
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def _spoken(message: str, args: argparse.Namespace) -> str:
    """Returns the message with options as flags or, where the command has none, as gin's."""
    for cls in getattr(args, "configured", ()):
        flags = {*args.flags, *(f"{flag}s" for flag in args.flags)}
        for name in {field.name for field in dataclasses.fields(cls)} - flags:
            gin = rf"\1 --gin.{cls.__name__}.{name}=VALUE"
            message = re.sub(rf"\b({_VERBS}) {name}\b", gin, message)
    return speaking_of_flags(message, args.flags)


def speaking_of_flags(message: str, flags: Iterable[str]) -> str:
    """Returns the message with the names of options written as the flags of the command line.

    >>> speaking_of_flags("top_k is -1: raise top_k, or pass truncate", ["top_k", "truncate"])
    '--top_k is -1: raise --top_k, or pass --truncate'
    >>> speaking_of_flags("gammas is 0: give at least 1", ["gamma"])
    '--gamma is 0: give at least 1'
    """
    for flag in flags:
        name = rf"(?<![\w./'\"-]){flag}(?![\w./'\"])"
        message = re.sub(rf"\bset {flag}=True", f"give --{flag}", message)
        message = re.sub(rf"^{name} is None", f"no --{flag} was given", message)
        if "_" in flag:
            message = re.sub(name, f"--{flag}", message)
        else:
            # The name may be a plain word: it is replaced only where an option is meant.
            message = re.sub(rf"^{name}(?= (is|are) )", f"--{flag}", message)
            message = re.sub(rf"\b({_VERBS}) {name}\b", rf"\1 --{flag}", message)
        # A repeatable flag sets an option whose name is the plural.
        message = re.sub(rf"^{flag}s(?= (is|hold) )", f"--{flag}", message)
        message = re.sub(rf"\b({_VERBS}) {flag}s\b", rf"\1 --{flag}", message)
    return message


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="spec-t5x", description="Lossless speculative decoding of encoder-decoder T5 models."
    )
    parser.add_argument("--version", action="version", version=f"spec-t5x {spec_t5x.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _modules().items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        _add_common(command)
        flags = [o[2:] for o in command._option_string_actions if o.startswith("--")]
        command.set_defaults(run=module.run, flags=flags, log_level=logging.INFO)
    return parser


def _modules() -> dict[str, Any]:
    """Imports the commands' modules, without those of a missing ``labs``; returns them by name."""
    modules: dict[str, Any] = {}
    for name, place in _COMMANDS.items():
        if extras.HAS_LABS or not place.startswith("labs."):
            module = importlib.import_module(f"spec_t5x.{place}")
            modules |= getattr(module, "TRAININGS", {name: module})
    return modules


def _add_common(command: argparse.ArgumentParser) -> None:
    """Adds the flags that all commands have."""
    levels = command.add_mutually_exclusive_group()
    add = functools.partial(levels.add_argument, action="store_const", dest="log_level")
    add("-q", "--quiet", const=logging.ERROR, help="print errors only, no progress")
    text = "also print what is loaded, compiled and measured"
    add("-v", "--verbose", const=logging.DEBUG, help=text)
    command.add_argument("--debug", action="store_true", help="print tracebacks of errors")


if __name__ == "__main__":
    sys.exit(main())
