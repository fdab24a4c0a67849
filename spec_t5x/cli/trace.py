"""What ``generate`` shows on a terminal: Figure 1's trace, and comparisons."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spec_t5x.experiments.comparison import Comparison
from spec_t5x.types import EOS_ID

ACCEPTED, REJECTED, TARGET = "green", "red strike", "blue"


def print_trace(
    generator, text: str, options, console: Console | None = None, place: int = 0
) -> None:
    """Decodes the input at ``place`` and prints a line for each iteration.

    As in Figure 1: green what the draft proposed and the target accepted, red what
    it rejected, blue the target's own token; the text so far is plain.
    """
    console = console or Console(highlight=False)
    ids = []
    for iteration in generator.steps(text, options, place):
        line = Text(_join(generator, ids))
        line.append_text(_iteration_text(generator, iteration))
        console.print(line, soft_wrap=True)
        ids.extend(iteration.appended[0, : iteration.num_appended[0]].tolist())


def _iteration_text(generator, iteration) -> Text:
    accepted, appended = int(iteration.num_accepted[0]), int(iteration.num_appended[0])
    proposed = iteration.proposed[0].tolist()
    line = Text(_join(generator, proposed[:accepted]), style=ACCEPTED)
    if accepted < appended:
        # The first rejected draft, then what the target put in its place. After
        # all were accepted nothing was rejected.
        if accepted < int(iteration.num_proposed[0]):
            line.append(_join(generator, proposed[accepted : accepted + 1]), style=REJECTED)
        line.append(_join(generator, [int(iteration.appended[0, accepted])]), style=TARGET)
    return line


def _join(generator, ids: list[int]) -> str:
    return "".join(f" {_piece(generator.vocabulary, i)}" for i in ids)


def _piece(vocabulary, token: int) -> str:
    if token == EOS_ID:
        return "[END]"
    # Beyond the vocabulary lies the padding of the embedding.
    return vocabulary.piece(token) if token < vocabulary.vocab_size else f"<{token}>"


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """The figures of ``--compare``, as a table."""
    console = console or Console(highlight=False)
    times = comparison.step_times
    table = Table(
        title=f"{comparison.num_inputs} inputs, gamma {comparison.gamma}, "
        f"temperature {comparison.temperature:g}",
        show_header=False,
    )
    rows = [
        ("plain decoding", f"{comparison.plain_rate:.1f} tokens/s"),
        ("speculative decoding", f"{comparison.speculative_rate:.1f} tokens/s"),
        ("speed-up", f"{comparison.speed_up:.2f}x"),
        ("speed-up of the loop alone", f"{comparison.loop_speed_up:.2f}x"),
        ("predicted (Theorem 3.8)", f"{comparison.predicted:.2f}x"),
        ("predicted, verification counted", f"{comparison.predicted_with_verification:.2f}x"),
        ("alpha", f"{comparison.alpha:.3f}"),
        ("mean acceptance length", f"{comparison.mean_acceptance_length:.2f}"),
        ("target, draft step", f"{times.target:.2f} ms, {times.draft:.2f} ms (c = {times.c:.2f})"),
        (f"verification of {comparison.gamma + 1}", f"{times.verification_cost:.2f} target steps"),
        (
            "compilation",
            f"{comparison.plain_compile_seconds:.1f} s plain, "
            f"{comparison.speculative_compile_seconds:.1f} s speculative (not counted)",
        ),
        ("outputs", _verdict(comparison)),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for divergence in comparison.divergences:
        console.print(
            f"differs at token {divergence.position}: plain {divergence.plain_token}, "
            f"speculative {divergence.speculative_token}, margin {divergence.margin:.2e}: "
            f"{divergence.input!r}"
        )


def _verdict(comparison: Comparison) -> str:
    if comparison.identical is None:
        return "two draws from one distribution"
    if comparison.identical:
        return "identical"
    return f"{len(comparison.divergences)} of {comparison.num_inputs} differ"
