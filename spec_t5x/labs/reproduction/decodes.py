"""Figures 1 and 5: what one decode accepted, and when target and draft ran in one."""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from spec_t5x.generation import GenerateOptions, StreamEvent
from spec_t5x.labs.benchmark import traces
from spec_t5x.labs.benchmark.comparison import Comparison, compare
from spec_t5x.labs.benchmark.reliability import caution
from spec_t5x.labs.reproduction import pairs
from spec_t5x.labs.reproduction.columns import Origin
from spec_t5x.labs.reproduction.contents import Exhibit, ReportFigure, ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Measure
from spec_t5x.labs.reproduction.plots import new_figure

# A sentence whose translation takes several calls, with drafts accepted and rejected.
_SENTENCE = (
    "The program reads the configuration file when it starts, and it prints a warning if an "
    "option is not known."
)
_PAIR = pairs.ENDE
_MAX_DECODE_LEN = 48
_GAMMA_1 = 5
_GAMMAS_5 = (7, 3)
# Of the blocks of Figure 5: the paper's, whose purple blocks call the target and blue ones the
# draft; its yellow and orange ones are encoders.
_COLOURS = {"encoders and prefill": "#fdd835", "draft": "#42a5f5", "target": "#7e57c2"}


def _generator():
    draft = pairs.load_draft(_PAIR.target, "transformer")
    return pairs.load_target(_PAIR.target).with_draft(draft)


# --- Figure 1 ------------------------------------------------------------------------


def _figure_1(options: ReproduceOptions, results: Measure) -> list[ReportFigure]:
    decoding = {"gamma": _GAMMA_1, "max_decode_len": _MAX_DECODE_LEN, "verifier": "token"}

    def measure() -> dict[str, Any]:
        lines = list(traces.iterations(_generator(), _SENTENCE, GenerateOptions(**decoding)))
        return {"tokens": traces.num_tokens(lines), "lines": list(map(dataclasses.asdict, lines))}

    inputs = pairs.inputs(_PAIR, ("transformer",), [_SENTENCE], decoding=decoding)
    found = results("figure1", inputs, 12.0, measure)
    if not found:
        return []
    trace = [traces.TraceLine(**line) for line in found["lines"]]
    caption = (
        f"{traces.counts(trace)}; the paper's example has 38 tokens with 9. Green: proposed "
        "by the draft and accepted. Red, struck out: rejected. Blue: the target's own token. "
        f"Target `{_PAIR.target}`, γ = {_GAMMA_1}, temperature 0, input “{_SENTENCE}”"
    )
    return [ReportFigure(name="figure1", caption=caption, origins=(Origin.MEASURED,), trace=trace)]


# --- Figure 5 ------------------------------------------------------------------------


def _figure_5(options: ReproduceOptions, results: Measure) -> list[ReportFigure]:
    repeats = 3 if options.quick else 9

    def measure() -> dict[str, Any]:
        generator, runs = _generator(), []
        for gamma in _GAMMAS_5:
            decoding = GenerateOptions(
                gamma=gamma, max_decode_len=_MAX_DECODE_LEN, verifier="token"
            )
            comparison = compare(generator, [_SENTENCE], decoding, repeats)
            runs.append(_run(gamma, comparison, list(generator.stream(_SENTENCE, decoding))))
        # Plain decoding, timed in turn with the last of them.
        runs.append(_run(0, comparison, []))
        return {"tokens": sum(run["tokens"] for run in runs), "runs": runs}

    settings = {"gammas": _GAMMAS_5, "repeats": repeats, "max_decode_len": _MAX_DECODE_LEN}
    inputs = pairs.inputs(_PAIR, ("transformer",), [_SENTENCE], **settings, version=5)
    found = results("figure5", inputs, 30.0, measure)
    if not found:
        return []
    runs = found["runs"]
    wholes = "; ".join(f"{run['run']} took {run['measured']:.0f} ms as a whole" for run in runs)
    caption = (
        "When target and draft run in the decode of one sentence, temperature 0. Each block is as "
        "long as such a call takes here (T(1), T(γ+1) and a draft step, measured apart), and as "
        "many are drawn as the decode made; above a target call, how many tokens it brought. "
        f"{wholes}."
    )
    if doubts := caution(runs):
        caption += f" {doubts}"
    plot = _draw_timeline(runs)
    return [ReportFigure(name="figure5", caption=caption, origins=(Origin.MEASURED,), plot=plot)]


def _run(gamma: int, comparison: Comparison, events: list[StreamEvent]) -> dict[str, Any]:
    """A decode: its steps' times in milliseconds, and what became of each proposal."""
    times, plain = comparison.step_times, not gamma
    seconds = comparison.plain_seconds if plain else comparison.speculative_seconds
    setup = comparison.plain_setup_seconds if plain else comparison.speculative_setup_seconds
    tokens = comparison.plain_tokens if plain else comparison.speculative_tokens
    return {
        "run": "standard decoding" if plain else f"γ = {gamma}",
        "tokens": tokens,
        "setup": 1e3 * statistics.median(setup),
        "draft_step": times.draft,
        "target_step": times.target if plain else times.verification,
        "proposed": [0] * tokens if plain else [len(event.proposed) for event in events],
        "appended": [1] * tokens if plain else [len(event.appended) for event in events],
        "measured": 1e3 * statistics.median(seconds),
        "beside": comparison.beside,
        "noise": comparison.is_noise and not plain,
    }


def blocks(run: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """The calls of a run, one after the other: kind, start and duration in milliseconds."""
    kinds = [("encoders and prefill", run["setup"])]
    for proposed in run["proposed"]:
        kinds += [("draft", run["draft_step"])] * proposed + [("target", run["target_step"])]
    found, start = [], 0.0
    for kind, duration in kinds:
        found.append((kind, start, duration))
        start += duration
    return found


def _draw_timeline(runs: list[Mapping[str, Any]]) -> Figure:
    """A row for each run, a bar for each block."""
    figure, axes = new_figure("milliseconds", "", width=11.0, height=1.6 + 0.7 * len(runs))
    axes.grid(visible=False)
    for row, run in enumerate(runs):
        calls = iter(run["appended"])
        for kind, start, duration in blocks(run):
            span = [(start, duration)]
            axes.broken_barh(span, (row - 0.3, 0.6), color=_COLOURS[kind], ec="white", lw=0.3)
            if kind == "target" and run["proposed"][0]:
                middle = start + duration / 2
                axes.text(middle, row - 0.34, str(next(calls)), ha="center", fontsize=8)
    axes.set_yticks(range(len(runs)), [run["run"] for run in runs])
    axes.invert_yaxis()
    handles = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    return figure


FIGURE_1 = Exhibit("Figure 1. One decode, a line for each call of the target", _figure_1)
FIGURE_5 = Exhibit("Figure 5. When encoders, draft and target ran", _figure_5)
