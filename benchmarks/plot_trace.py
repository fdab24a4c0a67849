"""Draws the trace of a correction, with a line per target call: ``docs/correction.svg``.

python -m benchmarks.plot_trace docs/correction.svg
"""

import io
import sys
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.labs.benchmark.console import print_trace

SOURCE = (
    "correct: Tom said that he was going to by a new car as soon as he have enough money to pay "
    "for it."
)


def main() -> int:
    """Writes the file named on the command line; returns 0, or 2 if there is no name."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
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
    Path(sys.argv[1]).write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
