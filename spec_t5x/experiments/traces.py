"""Figure 1: the iterations of one decode, a line each, for terminals and for files.

    green   proposed by the draft and accepted by the target
    red     (struck out) the first proposal that the target rejected
    blue    the target's own token: the correction, or the one after a whole block

A ``Trace`` is what happened, as texts; ``styled`` is the one place that says how it looks.
"""

import dataclasses
import io
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from spec_t5x.types import EOS_ID

ACCEPTED, REJECTED, TARGET = "green", "red strike", "blue"

# Dark enough to be read on white; rich's own are for black.
_THEME = TerminalTheme(
    (255, 255, 255),
    (40, 40, 40),
    [
        (0, 0, 0),
        (200, 30, 30),
        (20, 130, 40),
        (150, 110, 0),
        (30, 70, 210),
        (130, 40, 150),
        (0, 120, 130),
        (120, 120, 120),
    ],
)
_FONT = "ui-monospace, Menlo, 'DejaVu Sans Mono', Consolas, monospace"
# rich's templates without the window around the text, and without its fonts from the net.
_SVG = """<svg class="rich-terminal" viewBox="0 0 {terminal_width} {terminal_height}" \
xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: %s; font-size: {char_height}px; \
line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" \
width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
<rect fill="#ffffff" width="100%%" height="100%%" />
<g clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
""".replace("%s", _FONT).replace("%%", "%")
_HTML = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Speculative decoding, a line for each \
iteration</title><style>
{stylesheet}
body {{ color: {foreground}; background-color: {background}; }}
pre {{ font-family: %s; line-height: 1.5; }}
</style></head>
<body><pre><code>{code}</code></pre></body></html>
""".replace("%s", _FONT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceLine:
    """One iteration, as the texts of its tokens."""

    # The text so far.
    before: tuple[str, ...]
    accepted: tuple[str, ...]
    # None where nothing was rejected: all were accepted, or none proposed.
    rejected: str | None
    # The target's own token; None where the text ended inside the accepted drafts.
    corrected: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """One decode."""

    lines: tuple[TraceLine, ...]

    @property
    def target_calls(self) -> int:
        """Serial calls of the target: one for each iteration."""
        return len(self.lines)

    @property
    def num_tokens(self) -> int:
        """Tokens generated, end of sequence included."""
        own = sum(line.corrected is not None for line in self.lines)
        return own + sum(len(line.accepted) for line in self.lines)

    def to_json(self) -> list[dict[str, Any]]:
        """The trace as JSON can hold it."""
        return [dataclasses.asdict(line) for line in self.lines]

    @classmethod
    def from_json(cls, lines: list[dict[str, Any]]) -> "Trace":
        """The inverse of ``to_json``."""
        return cls(
            lines=tuple(
                TraceLine(
                    before=tuple(line["before"]),
                    accepted=tuple(line["accepted"]),
                    rejected=line["rejected"],
                    corrected=line["corrected"],
                )
                for line in lines
            )
        )


def record(generator, text: str, options, place: int = 0) -> Trace:
    """Decodes the input at ``place``; arguments and errors are ``Generator.steps``'s."""
    return Trace(lines=tuple(iterations(generator, text, options, place)))


def iterations(generator, text: str, options, place: int = 0) -> Iterator[TraceLine]:
    """A line for each iteration, as soon as it is done."""
    before: list[str] = []
    for iteration in generator.steps(text, options, place):
        accepted, appended = int(iteration.num_accepted[0]), int(iteration.num_appended[0])
        proposed = _pieces(generator.vocabulary, iteration.proposed[0])
        new = _pieces(generator.vocabulary, iteration.appended[0, :appended])
        ends_in_drafts = accepted == appended
        rejects = not ends_in_drafts and accepted < int(iteration.num_proposed[0])
        yield TraceLine(
            before=tuple(before),
            accepted=tuple(proposed[:accepted]),
            rejected=proposed[accepted] if rejects else None,
            corrected=None if ends_in_drafts else new[accepted],
        )
        before.extend(new)


def styled(line: TraceLine) -> Text:
    """The line for a terminal: a space before each token's text."""
    text = Text(_join(line.before))
    text.append(_join(line.accepted), style=ACCEPTED)
    if line.rejected is not None:
        text.append(_join([line.rejected]), style=REJECTED)
    if line.corrected is not None:
        text.append(_join([line.corrected]), style=TARGET)
    return text


def legend(target_calls: int, num_tokens: int) -> Text:
    """What the colours mean, and what the trace comes to."""
    return Text.assemble(
        f"{num_tokens} tokens with {target_calls} target calls: ",
        ("accepted", ACCEPTED),
        ", ",
        ("rejected", REJECTED),
        ", ",
        ("the target's own", TARGET),
    )


def plain_text(trace: Trace) -> str:
    """Without colours: ``[-rejected-]`` and ``{+corrected+}``, as word diffs write them."""
    lines = []
    for number, line in enumerate(trace.lines, 1):
        text = _join(line.before) + _join(line.accepted)
        if line.rejected is not None:
            text += f" [-{line.rejected}-]"
        if line.corrected is not None:
            text += f" {{+{line.corrected}+}}"
        lines.append(f"{number:3d} {text}")
    lines.append(
        f"{trace.num_tokens} tokens with {trace.target_calls} target calls: accepted, "
        "[-rejected-], {+the target's own+}"
    )
    return "\n".join(lines) + "\n"


def svg(trace: Trace, width: int = 110) -> str:
    """A picture that holds all it needs; ``width`` is in characters."""
    return _recorded(trace, width).export_svg(
        title="", theme=_THEME, code_format=_SVG, unique_id="trace"
    )


def html(trace: Trace, width: int = 110) -> str:
    """A page that holds all it needs; ``width`` is in characters."""
    return _recorded(trace, width).export_html(theme=_THEME, code_format=_HTML)


def _recorded(trace: Trace, width: int) -> Console:
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    # A grid, so that what is too long for a line goes on under its own beginning.
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", style="bright_black", no_wrap=True)
    grid.add_column()
    for number, line in enumerate(trace.lines, 1):
        grid.add_row(str(number), styled(line))
    console.print(grid)
    console.print()
    console.print(legend(trace.target_calls, trace.num_tokens))
    return console


def _pieces(vocabulary, ids) -> list[str]:
    return [_piece(vocabulary, int(token)) for token in ids]


def _piece(vocabulary, token: int) -> str:
    if token == EOS_ID:
        return "[END]"
    # Beyond the vocabulary lies the padding of the embedding.
    return vocabulary.piece(token) if token < vocabulary.vocab_size else f"<{token}>"


def _join(pieces) -> str:
    return "".join(f" {piece}" for piece in pieces)
