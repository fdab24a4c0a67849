"""Gin files and ``--gin.NAME=VALUE`` bindings, read as T5X's programs read them.

Includes are resolved here and not by gin, which ignores the including file's folder and fails
on folders that could be Python packages.
"""

import ast
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import gin

from spec_t5x.errors import InputError, as_input_error, did_you_mean
from spec_t5x.machine.paths import expanded

# The folder of ``gin_configs``: an installed package, or the folder above it in a checkout.
_PACKAGE = Path(__file__).parents[1]
GIN_ROOT = _PACKAGE if (_PACKAGE / "gin_configs").is_dir() else _PACKAGE.parent

_BINDING = re.compile(r"--gin\.([^=]+)=(.+)", re.DOTALL)
# A value such as a path or a prefix, which gin accepts only in quotes.
_BARE = re.compile(r"[\w./~:+ -]+")
_MACRO = re.compile(r"%([\w./]+)")
_INCLUDE = re.compile(r"""include\s+(['"])(.+?)\1""")
_IMPORT = re.compile(r"(import|from)\s")
_STRING_OR_COMMENT = re.compile(r"""'[^'\n]*'|"[^"\n]*"|#.*""")
# Exceptions that gin raises for a file that it cannot use, and its words that hide the place.
_ERRORS = (ValueError, SyntaxError, AttributeError, ImportError, OSError, tokenize.TokenError)
_WORDS_OF_GIN = re.compile(r"malformed node .*(?=Failed to parse)|(?<=In )bindings string ")

# Folders of ``--gin_search_paths``.
_search_paths: list[str] = []


def parse_gin(files: Sequence[str], flags: Sequence[str]) -> None:
    """Parses gin files and then flags; each overrides those before it.

    A flag is ``--gin.NAME=VALUE``, where NAME is a macro or a parameter; a path needs no quotes.
    A file, given or included, is looked for in the current folder, in those of
    ``add_search_paths``, beside the file that includes it, and (``gin_configs/…``) in the package
    or its checkout; the first that exists is read.

    Raises:
      InputError: a file is absent or a binding cannot be parsed, a macro that a file or flag
        uses is bound nowhere, or a flag binds a macro that no file or flag uses.
    """
    bindings = [_binding(flag) for flag in flags]
    parts = [*read_all(files), *zip(flags, bindings, strict=True)]
    used = {macro for _, text in parts for macro in _macros(text)}
    for name in (binding.partition("=")[0] for binding in bindings):
        # A name with a dot is a parameter's.
        if name not in used and "." not in name:
            raise InputError(
                f"nothing uses --gin.{name}{did_you_mean(name, used)}: leave it out, or give the "
                "file that does"
            )
    for name, text in parts:
        try:
            gin.parse_config(text)
        # Raised by a module of this package that the file imports.
        except InputError:
            raise
        except _ERRORS as error:
            reason = _WORDS_OF_GIN.sub("", " ".join(str(error).split()))
            quotes = ", text needs quotes" if "Failed to parse" in reason else ""
            raise InputError(f"gin: {name}: {reason}: fix it{quotes}") from error
    for name, text in parts:
        # A name with a dot is one of gin's constants, such as %gin.REQUIRED.
        left = [macro for macro in _macros(text) if "." not in macro and not _is_bound(macro)]
        if left:
            what = "macros" if len(left) > 1 else "macro"
            needed = " ".join(f"--gin.{macro}=VALUE" for macro in left)
            raise InputError(f"{name} needs the {what} {', '.join(left)}: add {needed}")


def add_search_paths(paths: Sequence[str]) -> None:
    """Adds folders to the search for gin files; raises ``InputError`` if one does not exist."""
    for path in paths:
        if not expanded(path).is_dir():
            raise InputError(f"no folder {path}: give existing --gin_search_paths")
        _search_paths.append(path)


def read_all(files: Sequence[str], includers: tuple[Path, ...] = ()) -> Iterator[tuple[str, str]]:
    """Reads gin files and their includes, in the order of parsing; ``includers`` led to them.

    Yields:
      A path, and its lines up to the next include or the end. Lines yielded before are empty, so
      that lines keep their numbers, except for imports, which hold in the whole file.
    """
    for name in files:
        path = _locate(name, includers)
        if path in includers:
            raise InputError(f"gin: {path} includes itself: remove an include")
        with as_input_error(f"gin: cannot read {path}", "fix the file", OSError, UnicodeError):
            lines = path.read_text(encoding="utf-8").splitlines()
        kept: list[str] = []
        for line in lines:
            if match := _INCLUDE.match(line):
                yield str(path), "".join(f"{each}\n" for each in kept)
                yield from read_all([match[2]], (*includers, path))
                kept = [each if _IMPORT.match(each) else "" for each in kept]
            kept.append("" if match else line)
        yield str(path), "".join(f"{each}\n" for each in kept)


def _locate(name: str, includers: tuple[Path, ...]) -> Path:
    beside = [includers[-1].parent] if includers else []
    for folder in ("", *_search_paths, *beside, GIN_ROOT):
        path = expanded(Path(folder, name))
        if path.is_file():
            return path
    if includers:
        raise InputError(
            f"gin: {includers[-1]} includes {name}, which does not exist: fix it, or add its "
            "folder to --gin_search_paths"
        )
    raise InputError(f"no gin file {name}: give an existing one")


def _binding(flag: str) -> str:
    """Returns the ``NAME=VALUE`` of a ``--gin.`` flag; puts a bare word or path in quotes."""
    match = _BINDING.fullmatch(flag)
    if not match:
        raise InputError(f"unknown argument {flag!r}: write --gin.NAME=VALUE")
    name, value = match.groups()
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        # On a command line users write false, which as a text would count as true.
        if value in ("true", "false"):
            value = value.capitalize()
        elif _BARE.fullmatch(value):
            value = repr(value)
    return f"{name}={value}"


def _macros(text: str) -> list[str]:
    """Returns the macros (``%NAME``) in gin code, outside of strings and comments, each once."""
    return list(dict.fromkeys(_MACRO.findall(_STRING_OR_COMMENT.sub("", text))))


def _is_bound(macro: str) -> bool:
    try:
        # T5X's files bind a macro without a default to ``%gin.REQUIRED``.
        return repr(gin.query_parameter(f"%{macro}")) != "%gin.REQUIRED"
    except ValueError:
        return False
