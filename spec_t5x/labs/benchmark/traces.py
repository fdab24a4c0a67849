"""Figure 1: the iterations of one decode, a line each.

green   proposed by the draft and accepted by the target
red     (struck out) the first proposal that the target rejected
blue    the target's own token: the correction, or the one after a whole block

Where there are no colours, ``[-rejected-]`` and ``{+the target's own+}``.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from rich.text import Text

from spec_t5x.types import EOS_ID

ACCEPTED, REJECTED, TARGET = "green", "red strike", "blue"
_REJECTED, _TARGET = "[-{}-]", "{{+{}+}}"
# Tokens before the new ones that tell a reader where in the text they are.
_BEFORE = 5


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


def num_tokens(lines: Sequence[TraceLine]) -> int:
    """Tokens generated, end of sequence included."""
    own = sum(line.corrected is not None for line in lines)
    return own + sum(len(line.accepted) for line in lines)


def counts(lines: Sequence[TraceLine]) -> str:
    """Tokens, and serial calls of the target: one for each iteration."""
    return f"{num_tokens(lines)} tokens with {len(lines)} target calls"


def iterations(generator, text: str, options, place: int = 0) -> Iterator[TraceLine]:
    """A line for each event of decoding the input at ``place``, as soon as it is there.

    Arguments and errors are ``Generator.stream``'s.
    """
    before: list[str] = []
    for event in generator.stream(text, options, place=place):
        accepted, rejected, new = (
            _pieces(generator.vocabulary, ids)
            for ids in (event.accepted, event.rejected, event.appended)
        )
        yield TraceLine(
            before=list(before),
            accepted=accepted,
            rejected=rejected[0] if rejected else None,
            corrected=None if event.own is None else new[-1],
        )
        before.extend(new)


def styled(line: TraceLine) -> Text:
    """The line for a terminal: a space before each token's text, the last ones of those before."""
    elided = " …" * (len(line.before) > _BEFORE)
    text = Text(elided + _join(line.before[-_BEFORE:]))
    text.append(_join(line.accepted), style=ACCEPTED)
    if line.rejected is not None:
        text.append(_join([line.rejected]), style=REJECTED)
    if line.corrected is not None:
        text.append(_join([line.corrected]), style=TARGET)
    return text


def marked(line: TraceLine) -> str:
    """The line without colours: the whole text so far, and marks.

    >>> marked(TraceLine(before=["the"], accepted=["cat"], rejected="sits", corrected="sat"))
    ' the cat [-sits-] {+sat+}'
    """
    rejected = [] if line.rejected is None else [_REJECTED.format(line.rejected)]
    own = [] if line.corrected is None else [_TARGET.format(line.corrected)]
    return _join([*line.before, *line.accepted, *rejected, *own])


def marked_legend(lines: Sequence[TraceLine]) -> str:
    """What the marks mean, and what the lines come to."""
    marks = _REJECTED.format("rejected"), _TARGET.format("the target's own")
    return f"{counts(lines)}: accepted, {', '.join(marks)}"


def legend(lines: Sequence[TraceLine]) -> Text:
    """What the colours mean, and what the lines come to."""
    parts = (("accepted", ACCEPTED), ", ", ("rejected", REJECTED), ", ")
    return Text.assemble(f"{counts(lines)}: ", *parts, ("the target's own", TARGET))


def _pieces(vocabulary, ids: Sequence[int]) -> list[str]:
    return [_piece(vocabulary, token) for token in ids]


def _piece(vocabulary, token: int) -> str:
    if token == EOS_ID:
        return "[END]"
    # Beyond the vocabulary lies the padding of the embedding.
    return vocabulary.piece(token) if token < vocabulary.vocab_size else f"<{token}>"


def _join(pieces) -> str:
    return "".join(f" {piece}" for piece in pieces)
