"""Griffe extension: turns comments and shared entries of docstrings into documentation."""

import ast
import itertools
import re

import griffe

# An entry of several arguments, "    plain, speculative: …", with its continuation lines.
_TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", re.MULTILINE)
# An example, up to the next empty line.
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Extension that documents fields, constants, options, shared entries and examples."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_) -> None:
        """Documents an attribute by the comment right above it, or else by its option's help."""
        lines = attr.lines_collection[attr.filepath][: attr.lineno - 1]
        above = itertools.takewhile(lambda line: line.lstrip().startswith("#"), reversed(lines))
        comment = [line.lstrip(" #") for line in above]
        text = "\n".join(reversed(comment)) or _help(attr.value)
        if text and not attr.docstring:
            attr.docstring = griffe.Docstring(text, parent=attr)

    def on_function_instance(self, *, func: griffe.Function, **_) -> None:
        """Splits an entry of several arguments into one entry for each."""

        def entries(match: re.Match) -> str:
            indent, names, text = match.groups()
            names = names.split(", ")
            if not {*names} <= {parameter.name for parameter in func.parameters}:
                return match.group()
            return "\n".join(f"{indent}{name}: {text}" for name in names)

        if func.docstring:
            func.docstring.value = _TOGETHER.sub(entries, func.docstring.value)

    def on_module_members(self, *, mod: griffe.Module, **_) -> None:
        """Clears ``__all__``, so that an object is documented only in its defining module."""
        mod.exports = None

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        """Marks examples as code blocks."""
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def _help(value: str | griffe.Expr | None) -> str:
    """Returns the help text in a call of ``spec_t5x.options.option``; "" for other values."""
    call = ast.parse(str(value), mode="eval").body
    if not isinstance(call, ast.Call) or getattr(call.func, "id", None) != "option":
        return ""
    text = call.args[1]
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
