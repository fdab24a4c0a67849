"""Figure 1: the iterations of one decode, a line each.

green   proposed by the draft and accepted by the target
red     (struck out) the first proposal that the target rejected
blue    the target's own token: the correction, or the one after a whole block
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.text import Text

from spec_t5x.types import EOS_ID

ACCEPTED, REJECTED, TARGET = "green", "red strike", "blue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceLine:
    """One iteration, as the texts of its tokens."""

    # The text so far.
    before: list[str]
    accepted: list[str]
    # None where nothing was rejected: all were accepted, or none proposed.
    rejected: str | None
    # The target's own token; None where the text ended inside the accepted drafts.
    corrected: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """One decode."""

    lines: tuple[TraceLine, ...]

    @classmethod
    def from_json(cls, lines: Iterable[Mapping[str, Any]]) -> "Trace":
        """From what ``dataclasses.asdict`` makes of the lines, or JSON of that."""
        return cls(lines=tuple(TraceLine(**line) for line in lines))

    @property
    def num_tokens(self) -> int:
        """Tokens generated, end of sequence included."""
        own = sum(line.corrected is not None for line in self.lines)
        return own + sum(len(line.accepted) for line in self.lines)

    @property
    def counts(self) -> str:
        """Tokens, and serial calls of the target: one for each iteration."""
        return f"{self.num_tokens} tokens with {len(self.lines)} target calls"


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
            before=list(before),
            accepted=proposed[:accepted],
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


def legend(trace: Trace) -> Text:
    """What the colours mean, and what the trace comes to."""
    parts = (("accepted", ACCEPTED), ", ", ("rejected", REJECTED), ", ")
    return Text.assemble(f"{trace.counts}: ", *parts, ("the target's own", TARGET))


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
    lines.append(f"{trace.counts}: accepted, [-rejected-], {{+the target's own+}}")
    return "\n".join(lines) + "\n"


def _pieces(vocabulary, ids) -> list[str]:
    return [_piece(vocabulary, int(token)) for token in ids]


def _piece(vocabulary, token: int) -> str:
    if token == EOS_ID:
        return "[END]"
    # Beyond the vocabulary lies the padding of the embedding.
    return vocabulary.piece(token) if token < vocabulary.vocab_size else f"<{token}>"


def _join(pieces) -> str:
    return "".join(f" {piece}" for piece in pieces)
