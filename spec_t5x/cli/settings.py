"""Flags of the commands, and the dataclasses that flags and gin configure.

An option's value is its flag's, else gin's, else the default.
"""

import argparse
import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

from spec_t5x.checkpoints.named_models import Models
from spec_t5x.cli import standard_streams
from spec_t5x.errors import InputError
from spec_t5x.options import GenerateOptions

NO_LABS = "needs spec_t5x.labs, which is not installed: pip install spec_t5x again"
_WORDS = {"true": True, "false": False}


def gamma(text: str) -> int | str:
    """Parses a whole number; returns other text as it is, for ``GenerateOptions`` to check."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 3,2") from error


def _lengths(text: str) -> dict:
    try:
        return dict(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no dict like {{'inputs': 512}}") from error


# By annotation: the function that parses a flag's value, and the metavar.
_TYPES = {
    int: (int, "N"),
    int | None: (int, "N"),
    float: (float, "X"),
    float | None: (float, "X"),
    int | str: (gamma, "N"),
    bool | str | None: (lambda text: _WORDS.get(text.lower(), text), "WHEN"),
    tuple: (_numbers, "N,N"),
    tuple | None: (_numbers, "N,N"),
    tuple | list | str | None: (lambda text: tuple(filter(None, text.split(","))), "DIR,DIR"),
    dict | None: (_lengths, "{'inputs':N,'targets':N}"),
}
CACHES = ("use_cached_tasks", "seqio_additional_cache_dirs")


def flags_of(cls: type, *names: str) -> dict[str, tuple[Any, str]]:
    """Returns ``add_flags``' flags of a dataclass's ``options.option`` fields, or of ``names``."""
    flags = {}
    for field in dataclasses.fields(cls):
        if "help" in field.metadata:
            name, default, text = field.name, field.default, field.metadata["help"]
            kind = field.metadata["kind"] or field.type
            if isinstance(kind, list):
                kind, *flag = kind
                name, kind = flag[0] if flag else name.removesuffix("s"), [kind, name]
            if default is not None and default is not False and default not in ("", ()):
                values = default if isinstance(default, tuple) else (default,)
                shown = (f"{each:g}" if isinstance(each, float) else str(each) for each in values)
                text += f" (default: {' and '.join(shown)})"
            flags[name] = kind, text
    return {name: flags[name] for name in names or flags}


def add_flags(parser, flags: Mapping[str, tuple[Any, str]]) -> None:
    """Adds a flag for each option; its default is None, so that ``configured`` asks gin.

    ``flags`` are ``{name: (kind, help)}``. A kind is ``bool`` for a switch, a tuple of choices, a
    string (the metavar of a text) or a key of ``_TYPES``. ``[kind]`` is a repeatable flag; its
    values are those of the option with the plural name, or of ``option`` in ``[kind, option]``.
    """
    for name, (kind, text) in flags.items():
        options: dict[str, Any] = {}
        if isinstance(kind, list):
            kind, *option = kind
            options = {"action": "append", "dest": option[0] if option else f"{name}s"}
        if kind is bool:
            options["action"] = "store_true"
        elif isinstance(kind, tuple):
            options["choices"] = kind
        elif isinstance(kind, str):
            options["metavar"] = kind
            if kind == "TEXT":
                options["type"] = standard_streams.text
        else:
            options["type"], options["metavar"] = _TYPES[kind]
        # argparse formats the help with ``%``.
        text = text.replace("%", "%%")
        parser.add_argument(f"--{name}", default=None, help=text, **options)


def add_text(parser: argparse.ArgumentParser) -> None:
    """Adds the positional argument ``TEXT``: any number of input texts."""
    parser.add_argument(
        "text", nargs="*", metavar="TEXT", type=standard_streams.text, help="input text; repeatable"
    )


def add_gin(
    parser: argparse.ArgumentParser, of_what: str = "settings", required: bool = False
) -> None:
    """Adds the flags of gin files; ``main`` parses ``--gin.NAME=VALUE``, which is no flag."""
    group = parser.add_argument_group("gin", "--gin.NAME=VALUE overrides a value of the files")
    options = {"action": "append", "metavar": "FILE", "default": [], "required": required}
    group.add_argument("--gin_file", help=f"gin file with {of_what}; repeatable", **options)
    text = "folders to search for gin files"
    add_flags(group, {"gin_search_paths": (tuple | list | str | None, text)})


def add_arguments(parser: argparse.ArgumentParser, **other: tuple[Any, str]) -> None:
    """Adds the flags of ``Models``, of ``GenerateOptions`` with ``other`` texts, and of gin."""
    add_flags(parser.add_argument_group("models"), flags_of(Models))
    add_flags(parser.add_argument_group("decoding"), flags_of(GenerateOptions) | other)
    add_gin(parser)


def configured(args: argparse.Namespace, *classes: type) -> list[Any]:
    """Makes an object of each dataclass; flags override gin, which overrides the defaults."""
    import gin

    from spec_t5x.cli.gin_files import parse_gin

    # Messages name options that only gin sets as gin does (``main``).
    args.configured = classes
    makers = [gin.external_configurable(cls, module="spec_t5x") for cls in classes]
    parse_gin(args.gin_file, args.gin_bindings)
    names = {f"spec_t5x.{cls.__name__}" for cls in classes}
    # Nothing is made in a scope. gin has no public list of its bindings.
    for scope, name in gin.config._CONFIG:
        if scope and name in names:
            raise InputError(f"gin binds {name} in the scope {scope}: leave {scope}/ out")
    return [make(**given(args, cls)) for make, cls in zip(makers, classes, strict=True)]


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Returns the values of the flags that were given and are fields of the dataclass ``cls``."""
    values = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(cls)}
    # argparse makes a list of a repeatable flag's values.
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }


def check_no_task(args: argparse.Namespace, options: Any) -> None:
    """Raises ``InputError`` if a flag is a task's and there is none; gin files may bind any."""
    for name in ("split", "task_modules"):
        value = given(args, type(options)).get(name)
        if value is not None and options.mixture_or_task is None:
            raise InputError(f"{name} is {value!r} and there is no mixture_or_task: leave it out")


def read(args: argparse.Namespace, *classes: type, **defaults: Any) -> list[Any]:
    """Makes ``Models``, ``GenerateOptions`` with ``defaults``, and an object of each class."""
    import gin

    models, decoding, *others = configured(args, Models, GenerateOptions, *classes)
    bound = gin.get_bindings("spec_t5x.GenerateOptions", resolve_references=False)
    unset = defaults.keys() - (bound | given(args, GenerateOptions)).keys()
    return [models, dataclasses.replace(decoding, **{k: defaults[k] for k in unset}), *others]
