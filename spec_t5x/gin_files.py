"""Reading gin files and ``--gin.NAME=VALUE`` bindings, as T5X's programs take them."""

import re
import tokenize
from collections.abc import Sequence
from pathlib import Path

import gin

from spec_t5x.errors import InputError

_BINDING = re.compile(r"--gin\.([^=]+=.+)", re.DOTALL)
_MACRO = re.compile(r"%(\w+)")
_STRING_OR_COMMENT = re.compile(r"""'[^'\n]*'|"[^"\n]*"|#.*""")


def parse_gin(files: Sequence[str], flags: Sequence[str]) -> None:
    """Parses gin files, then the flags, which override them.

    Args:
      files: paths, later ones override earlier ones.
      flags: ``--gin.NAME=VALUE``, a macro or a parameter.

    Raises:
      InputError: a file is absent, something cannot be parsed, or a macro that a
        file or flag uses is bound nowhere.
    """
    for name in files:
        if not Path(name).is_file():
            raise InputError(f"no gin file {name}: give an existing one")
    bindings = [_binding(flag) for flag in flags]
    try:
        # Not finalized: gin's own report of an unbound macro quotes the whole config.
        gin.parse_config_files_and_bindings(list(files), bindings, finalize_config=False)
    except (
        ValueError,
        SyntaxError,
        AttributeError,
        ImportError,
        OSError,
        tokenize.TokenError,
    ) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"gin: {reason}: mend the file or the binding") from error
    texts = {name: Path(name).read_text(encoding="utf-8") for name in files}
    texts |= dict(zip(flags, bindings, strict=True))
    for name, text in texts.items():
        for macro in _MACRO.findall(_STRING_OR_COMMENT.sub("", text)):
            _check_bound(macro, name)


def _binding(flag: str) -> str:
    match = _BINDING.fullmatch(flag)
    if not match:
        raise InputError(f"unknown argument {flag!r}: write --gin.NAME=VALUE")
    return match.group(1)


def _check_bound(macro: str, file: str) -> None:
    try:
        gin.query_parameter(f"%{macro}")
    except ValueError as error:
        raise InputError(f"{file} needs the macro {macro}: add --gin.{macro}=VALUE") from error
