"""Figure 1: the iterations of one decode, a line each.

green   proposed by the draft and accepted by the target
red     (struck out) the first proposal that the target rejected
blue    the target's own token: the correction, or the one after a whole block

Without colours, ``[-rejected-]`` and ``{+the target's own+}``.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from rich.text import Text

from spec_t5x.types import EOS_ID

# Style of a token by its kind in a terminal, and its mark without colours.
_STYLES = {"accepted": "green", "rejected": "red strike", "the target's own": "blue"}
_MARKS = {"rejected": "[-{}-]", "the target's own": "{{+{}+}}"}
# Number of earlier tokens that a terminal shows before the new ones.
_BEFORE = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceLine:
    """Texts of the tokens of one iteration."""

    # All tokens of the output before this iteration.
    before: list[str]
    accepted: list[str]
    # The first rejected proposal; None if all were accepted or none was proposed.
    rejected: str | None
    # The target's own token; None if the text ended inside the accepted drafts.
    corrected: str | None

    def new(self) -> Iterator[tuple[str, str]]:
        """Yields (kind, text) of each token, the rejected one included; see ``_STYLES``."""
        yield from (("accepted", piece) for piece in self.accepted)
        rest = {"rejected": self.rejected, "the target's own": self.corrected}
        yield from (each for each in rest.items() if each[1] is not None)


def num_tokens(lines: Sequence[TraceLine]) -> int:
    """Counts the generated tokens of all lines, end of sequence included."""
    return sum(kind != "rejected" for line in lines for kind, _ in line.new())


def counts(lines: Sequence[TraceLine]) -> str:
    """Returns "38 tokens with 9 target calls": an iteration, or line, is one call."""
    return f"{num_tokens(lines)} tokens with {len(lines)} target calls"


def iterations(generator, text: str, options, place: int = 0) -> Iterator[TraceLine]:
    """Decodes a text and yields the line of each iteration as soon as it is decoded.

    Arguments and errors are those of ``Generator.stream``.
    """

    def pieces(ids: Sequence[int]) -> list[str]:
        # Ids beyond the vocabulary are the padding of the embedding.
        known = generator.vocabulary
        return [
            "[END]" if i == EOS_ID else known.piece(i) if i < known.vocab_size else f"<{i}>"
            for i in ids
        ]

    before: list[str] = []
    for event in generator.stream(text, options, place=place):
        new = pieces(event.appended)
        yield TraceLine(
            before=list(before),
            accepted=pieces(event.accepted),
            rejected=pieces(event.rejected[:1])[0] if event.rejected else None,
            corrected=None if event.own is None else new[-1],
        )
        before.extend(new)


def styled(line: TraceLine) -> Text:
    """Colours a line for a terminal: the last few earlier tokens, then the new ones."""
    shown = ["…"] * (len(line.before) > _BEFORE) + line.before[-_BEFORE:]
    text = Text("".join(f" {piece}" for piece in shown))
    for kind, piece in line.new():
        text.append(f" {piece}", style=_STYLES[kind])
    return text


def marked(line: TraceLine) -> str:
    """Formats a line without colours: the whole text so far, then the new tokens with marks.

    >>> marked(TraceLine(before=["the"], accepted=["cat"], rejected="sits", corrected="sat"))
    ' the cat [-sits-] {+sat+}'
    """
    new = [_MARKS.get(kind, "{}").format(piece) for kind, piece in line.new()]
    return "".join(f" {piece}" for piece in [*line.before, *new])


def legend(lines: Sequence[TraceLine], *, coloured: bool) -> Text:
    """Returns the lines' counts of tokens and calls, and the meaning of the colours or marks."""
    if coloured:
        kinds = [Text(kind, style) for kind, style in _STYLES.items()]
    else:
        kinds = [Text(_MARKS.get(kind, "{}").format(kind)) for kind in _STYLES]
    return Text(f"{counts(lines)}: ") + Text(", ").join(kinds)
