"""Figures 1 and 5: the accepted drafts of one decode, and a timeline of its calls."""

import dataclasses
import itertools
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
from spec_t5x.labs.reproduction.contents import Exhibit, Origin, ReportFigure, ReproduceOptions
from spec_t5x.labs.reproduction.kept_results import Measure
from spec_t5x.labs.reproduction.plots import new_figure

# A sentence whose translation takes several calls, with drafts accepted and rejected.
_SENTENCE = (
    f"{pairs.ENDE.prefix}The program reads the configuration file when it starts, and it prints a "
    "warning if an option is not known."
)
_PAIR = pairs.ENDE
_MAX_DECODE_LEN = 48
_GAMMA_1 = 5
_GAMMAS_5 = (7, 3)
# Colours of Figure 5's blocks, as the paper has them.
_COLOURS = {"encoders and prefill": "#fdd835", "draft": "#42a5f5", "target": "#7e57c2"}


def _generator():
    draft = pairs.load_draft(_PAIR.target, "transformer")
    return pairs.load_target(_PAIR.target).with_draft(draft)


def _figure_1(options: ReproduceOptions, results: Measure) -> list[ReportFigure]:
    decoding = {"gamma": _GAMMA_1, "max_decode_len": _MAX_DECODE_LEN, "verifier": "token"}

    def measure() -> dict[str, Any]:
        lines = list(traces.iterations(_generator(), _SENTENCE, GenerateOptions(**decoding)))
        return {"tokens": traces.num_tokens(lines), "lines": list(map(dataclasses.asdict, lines))}

    inputs = pairs.inputs(_PAIR, ("transformer",), [_SENTENCE], decoding=decoding)
    found = results("figure1", inputs, measure)
    if not found:
        return []
    trace = [traces.TraceLine(**line) for line in found["lines"]]
    caption = (
        f"{traces.counts(trace)}; the paper's example has 38 tokens with 9. Green: proposed "
        "by the draft and accepted. Red, struck out: rejected. Blue: the target's own token. "
        f"Target `{_PAIR.target}`, γ = {_GAMMA_1}, temperature 0, input “{_SENTENCE}”"
    )
    return [ReportFigure(name="figure1", caption=caption, origins=(Origin.MEASURED,), trace=trace)]


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
        # Plain decoding, as timed in turn with the last gamma.
        runs.append(_run(0, comparison, []))
        return {"tokens": sum(run["tokens"] for run in runs), "runs": runs}

    settings = {"gammas": _GAMMAS_5, "repeats": repeats, "max_decode_len": _MAX_DECODE_LEN}
    inputs = pairs.inputs(_PAIR, ("transformer",), [_SENTENCE], **settings, version=5)
    found = results("figure5", inputs, measure)
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
    """Returns a row of Figure 5, plain at gamma 0: milliseconds, and tokens of each target call."""
    times, way = comparison.step_times, "speculative" if gamma else "plain"
    tokens = getattr(comparison, f"{way}_tokens")
    return {
        "run": f"γ = {gamma}" if gamma else "standard decoding",
        "tokens": tokens,
        "setup": 1e3 * statistics.median(getattr(comparison, f"{way}_setup_seconds")),
        "draft_step": times.draft,
        "target_step": times.verification if gamma else times.target,
        "proposed": [len(event.proposed) for event in events] if gamma else [0] * tokens,
        "appended": [len(event.appended) for event in events] if gamma else [1] * tokens,
        "measured": 1e3 * statistics.median(getattr(comparison, f"{way}_seconds")),
        "beside": comparison.beside,
        "noise": bool(gamma) and comparison.is_noise,
    }


def blocks(run: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Returns kind, start and duration in milliseconds of each call of a run, in order."""
    calls = [("encoders and prefill", run["setup"])]
    for proposed in run["proposed"]:
        calls += [("draft", run["draft_step"])] * proposed + [("target", run["target_step"])]
    ends = itertools.accumulate((duration for _, duration in calls), initial=0.0)
    return [(kind, start, duration) for (kind, duration), start in zip(calls, ends, strict=False)]


def _draw_timeline(runs: list[Mapping[str, Any]]) -> Figure:
    """Draws a row for each run, with a bar for each call and the tokens of target calls above."""
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
