"""Griffe's extension: what the docstrings' style leaves to the reader's eye."""

import ast
import itertools
import re

import griffe

# "    plain, speculative: what they are", with the lines that are indented further.
_TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", re.MULTILINE)
# Up to the next empty line.
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Comments above fields and constants, help of options, shared descriptions, examples."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_) -> None:
        """Gives an attribute its help, or the comment right above it, which Python drops."""
        lines = attr.lines_collection[attr.filepath][: attr.lineno - 1]
        above = itertools.takewhile(lambda line: line.lstrip().startswith("#"), reversed(lines))
        comment = [line.lstrip(" #") for line in above]
        text = "\n".join(reversed(comment)) or _help(attr.value)
        if text and not attr.docstring:
            attr.docstring = griffe.Docstring(text, parent=attr)

    def on_function_instance(self, *, func: griffe.Function, **_) -> None:
        """Gives each argument an entry with its type."""

        def entries(match: re.Match) -> str:
            indent, names, text = match.groups()
            names = names.split(", ")
            if not {*names} <= {parameter.name for parameter in func.parameters}:
                return match.group()
            return "\n".join(f"{indent}{name}: {text}" for name in names)

        if func.docstring:
            func.docstring.value = _TOGETHER.sub(entries, func.docstring.value)

    def on_module_members(self, *, mod: griffe.Module, **_) -> None:
        """Describes what a package exports in the module that has it, and not a second time."""
        mod.exports = None

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        """Marks examples as code."""
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def _help(value: str | griffe.Expr | None) -> str:
    """Returns the help of a field that ``spec_t5x.options.option`` declares."""
    call = ast.parse(str(value), mode="eval").body
    if not isinstance(call, ast.Call) or getattr(call.func, "id", None) != "option":
        return ""
    text = call.args[1]
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
