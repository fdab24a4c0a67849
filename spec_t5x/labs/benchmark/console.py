"""Output of ``generate --trace``, as in the paper's Figure 1, and ``generate --compare``."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spec_t5x.labs.benchmark import traces
from spec_t5x.labs.benchmark.comparison import Comparison
from spec_t5x.labs.benchmark.reliability import caution


def print_trace(
    generator, text: str, options, console: Console | None = None, place: int = 0
) -> None:
    """Decodes ``text``, the input at ``place``; prints a line for each iteration, then a legend.

    Tokens are coloured where there are colours, else marked (``labs.benchmark.traces``).
    """
    console = console or Console(highlight=False)
    coloured, lines = bool(console.color_system) and not console.no_color, []
    for line in traces.iterations(generator, text, options, place):
        lines.append(line)
        shown = traces.styled(line) if coloured else Text(traces.marked(line))
        console.print(shown, soft_wrap=True)
    console.print(traces.legend(lines, coloured=coloured), soft_wrap=True)


def print_comparison(comparison: Comparison) -> None:
    """Prints the figures of ``--compare`` as a table."""
    console = Console(highlight=False)
    times, count = comparison.step_times, comparison.num_inputs
    loop = comparison.loop_speed_up
    alpha, verified = "alpha", f"{comparison.gamma + 1}"
    if comparison.acceptance_by_position is not None:
        alpha, verified = "alpha of first children", "a tree"
    table = Table(
        title=f"{count} input{'s' * (count > 1)}, gamma {comparison.gamma}, "
        f"temperature {comparison.temperature:g}",
        show_header=False,
    )
    for row in (
        ("plain decoding", f"{comparison.plain_rate:.1f} tokens/s"),
        ("speculative decoding", f"{comparison.speculative_rate:.1f} tokens/s"),
        ("speed-up", f"{comparison.speed_up:.2f}x"),
        ("speed-up of the loop alone", "—" if loop is None else f"{loop:.2f}x"),
        ("predicted (Theorem 3.8)", f"{comparison.predicted:.2f}x"),
        ("predicted, verification counted", f"{comparison.predicted_with_verification:.2f}x"),
        (alpha, "—" if comparison.alpha is None else f"{comparison.alpha:.3f}"),
        ("block efficiency", f"{comparison.block_efficiency:.2f}"),
        *_plain_steps(comparison),
        ("target, draft step", f"{times.target:.2f} ms, {times.draft:.2f} ms (c = {times.c:.2f})"),
        (f"verification of {verified}", f"{times.verification_cost:.2f} target steps"),
        (
            "compilation",
            f"{comparison.plain_compile_seconds:.1f} s plain, "
            f"{comparison.speculative_compile_seconds:.1f} s speculative (not counted)",
        ),
        ("outputs", _verdict(comparison)),
    ):
        table.add_row(*row)
    console.print(table)
    if comparison.left_out is not None:
        why = f"gamma auto chose 0, so both sides are plain decoding: {comparison.left_out}"
        console.print(f"{why}; give gamma a number to see the draft at work", markup=False)
    for divergence in comparison.divergences:
        console.print(
            f"differs at token {divergence.position}: plain {divergence.plain_token}, "
            f"speculative {divergence.speculative_token}, margin {divergence.margin:.2e}: "
            f"{divergence.input!r}",
            markup=False,
            soft_wrap=True,
        )
    if doubts := caution([comparison.to_dict()]):
        console.print(doubts, markup=False, soft_wrap=True)


def _plain_steps(comparison: Comparison) -> list[tuple[str, str]]:
    """Returns a row, named as in the tables of ``sweep``, if there are calls without drafts."""
    share = comparison.plain_steps / comparison.target_calls
    return [("plain steps", f"{share:.0%}")] if share else []


def _verdict(comparison: Comparison) -> str:
    if comparison.identical is None and comparison.lossy:
        return "draws from two distributions (lossy)"
    if comparison.identical is None:
        return "two draws from one distribution"
    if comparison.identical:
        return "identical"
    lossy = " (the verifier is lossy)" if comparison.lossy else ""
    return f"{len(comparison.divergences)} of {comparison.num_inputs} differ{lossy}"
