"""Draws the trace of a correction, with a line per target call: ``docs/correction.svg``.

python -m benchmarks.plot_trace docs/correction.svg
"""

import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from benchmarks import command
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark.console import print_trace

SOURCE = (
    "correct: Tom said that he was going to by a new car as soon as he have enough money to pay "
    "for it."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the file named on the command line."""
    parser = command.parser("plot_trace", __doc__)
    parser.add_argument("picture", type=Path, metavar="FILE.svg", help="picture to write")
    args = parser.parse_args(arguments)
    generator = Generator.load("t5-target", "copy")
    console = Console(record=True, width=132, file=io.StringIO(), force_terminal=True)
    pieces = [generator.vocabulary.piece(token) for token in generator.vocabulary.encode(SOURCE)]
    console.print(f"source: {' '.join(pieces)}", highlight=False)
    print_trace(generator, SOURCE, GenerateOptions(gamma=15), console)
    # Without @font-face rules, so that the picture loads nothing from the network.
    start, end = (CONSOLE_SVG_FORMAT.index(part) for part in ("@font-face", ".{unique_id}-matrix"))
    shape = CONSOLE_SVG_FORMAT[:start] + CONSOLE_SVG_FORMAT[end:]
    title = "spec-t5x generate --draft copy --gamma 15 --trace"
    svg = console.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME, code_format=shape)
    args.picture.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
