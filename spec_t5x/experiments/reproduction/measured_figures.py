"""Figures 1 and 5 from real decodes: what was accepted, and when each call ran."""

from collections.abc import Mapping, Sequence

from spec_t5x.experiments.reproduction import pairs
from spec_t5x.experiments.reproduction.items import Done, Item, Json, Part, Setting
from spec_t5x.experiments.reproduction.pairs import Pair
from spec_t5x.experiments.reproduction.sections import Column, Drawing, Origin, Section, Table

_MAX_DECODE_LEN = 48


def _pair_for_text() -> Pair:
    """The language models, as in the paper's Figure 1; translation where they are missing."""
    return pairs.LANGUAGE if pairs.missing(pairs.LANGUAGE) is None else pairs.ENDE


# --- Figure 1 ------------------------------------------------------------------------

_TITLE_1 = "Figure 1. One decode, a line for each call of the target"
_GAMMA_1 = 5


def _parts_1(setting: Setting) -> list[Part]:
    pair = _pair_for_text()
    texts = pair.texts(setting, 20)
    # Sampled, as unconditional text must be; a translation is the likeliest one.
    temperature = 1.0 if pair == pairs.LANGUAGE else 0.0
    options = {
        "gamma": _GAMMA_1,
        "temperature": temperature,
        "max_decode_len": _MAX_DECODE_LEN,
        "seed": setting.seed,
    }
    return [
        Part(
            name="figure1",
            inputs=pairs.inputs(pair, ("transformer",), texts, options=options),
            seconds=12.0,
            # The longest of a few: there is more to see.
            compute=lambda report: _trace(pair, max(texts.texts, key=len), options),
        )
    ]


def _trace(pair: Pair, text: str, options: Mapping[str, Json]) -> Json:
    from spec_t5x.experiments import traces
    from spec_t5x.generation import GenerateOptions

    generator = pairs.load_target(pair).with_draft(pairs.load_draft(pair, "transformer"))
    decoding = GenerateOptions(verifier="token", truncate=pair.truncate, **options)
    trace = traces.record(generator, text, decoding)
    return {
        "tokens": trace.num_tokens,
        "pair": pair.name,
        "text": text,
        "options": dict(options),
        "lines": trace.to_json(),
    }


def _render_1(setting: Setting, done: Mapping[str, Done]) -> Section:
    from spec_t5x.experiments import traces

    if "figure1" not in done:
        return Section(title=_TITLE_1, finding="Nothing was decoded here.")
    result = done["figure1"].result
    trace = traces.Trace.from_json(result["lines"])
    finding = (
        f"{trace.num_tokens} tokens with {trace.target_calls} serial calls of the target; the "
        "paper's example has 38 tokens with 9."
    )
    options = result["options"]
    drawing = Drawing(
        name="figure1",
        caption="Green: proposed by the draft and accepted. Red, struck out: rejected. Blue: the "
        "target's own token.",
        origins=(Origin.MEASURED,),
        svg=traces.svg(trace),
        files={"figure1.html": traces.html(trace), "figure1.txt": traces.plain_text(trace)},
        text=traces.plain_text(trace),
        parts=("figure1",),
    )
    return Section(
        title=_TITLE_1,
        finding=finding,
        paragraphs=(
            finding,
            f"Target `{result['pair']}-target`, gamma {options['gamma']}, temperature "
            f"{options['temperature']:g}, seed {options['seed']}, input {result['text']!r}. "
            "`spec-t5x generate --trace` prints the same of any input.",
        ),
        content=(drawing,),
    )


# --- Figure 5 ------------------------------------------------------------------------

_TITLE_5 = "Figure 5. When encoders, draft and target ran"
_GAMMAS = (7, 3, 0)


def _parts_5(setting: Setting) -> list[Part]:
    pair = pairs.ENDE
    texts = pair.texts(setting, 60)
    options = {"max_decode_len": _MAX_DECODE_LEN, "seed": setting.seed}
    repeats = 3 if setting.quick else 9
    return [
        Part(
            name="figure5",
            inputs=pairs.inputs(
                pair,
                ("transformer",),
                texts,
                gammas=list(_GAMMAS),
                repeats=repeats,
                options=options,
            ),
            seconds=30.0,
            compute=lambda report: _timeline(pair, texts.texts, options, repeats),
        )
    ]


def _timeline(pair: Pair, texts: Sequence[str], options: Mapping[str, Json], repeats: int) -> Json:
    from spec_t5x.experiments import timeline
    from spec_t5x.generation import GenerateOptions

    generator = pairs.load_target(pair).with_draft(pairs.load_draft(pair, "transformer"))
    decoding = GenerateOptions(verifier="token", **options)
    # Of the length that Table 2 decodes, whose programs are there; there is more to see in
    # the longest.
    text = max(pairs.of_one_shape(generator, texts, decoding, len(texts)), key=len)
    runs = timeline.record(generator, text, decoding, _GAMMAS, repeats)
    return {
        "tokens": sum(run.num_tokens for run in runs),
        "text": text,
        "runs": [run.to_json() for run in runs],
    }


def _render_5(setting: Setting, done: Mapping[str, Done]) -> Section:
    from spec_t5x.experiments import timeline

    if "figure5" not in done:
        return Section(title=_TITLE_5, finding="Nothing was timed here.")
    result = done["figure5"].result
    runs = [timeline.Run.from_json(run) for run in result["runs"]]
    return Section(
        title=_TITLE_5,
        finding=finding_5(runs),
        paragraphs=(
            finding_5(runs),
            "Each block was called from the host and waited for, with the clock read before and "
            "after; of several runs the one of median length is shown, as it was. The compiled "
            "loop does the same work in one program, without the host's calls between blocks; "
            "its time is in the table. The first draft step of an iteration feeds two tokens, "
            "which makes good the one that was not fed when all drafts were accepted.",
            f"Target `{pairs.ENDE.target}`, temperature 0, input {result['text']!r}. The trace "
            "file opens in ui.perfetto.dev and in chrome://tracing.",
        ),
        content=(
            Drawing(
                name="figure5",
                caption="Speculative decoding with two values of gamma, and standard decoding.",
                origins=(Origin.MEASURED,),
                svg=timeline.svg(runs),
                files={"figure5.trace.json": timeline.chrome_trace(runs)},
                parts=("figure5",),
            ),
            _times_table(runs),
        ),
    )


def finding_5(runs: Sequence) -> str:
    """Calls and times of the compiled loops of some ``timeline.Run``, in one sentence."""
    shown = [
        f"{run.label}: {run.num_tokens} tokens in {run.target_calls} target calls, "
        f"{run.loop_us / 1e3:.1f} ms"
        for run in runs
    ]
    fastest = min(runs, key=lambda run: run.loop_us)
    return f"The compiled loops, {'; '.join(shown)}: the fastest is {fastest.label}."


def _times_table(runs: Sequence) -> Table:
    from spec_t5x.experiments import timeline

    measured = Origin.MEASURED
    return Table(
        caption="Milliseconds of the rows above, by kind of block.",
        columns=(
            Column("run", Origin.LABEL),
            Column("tokens", measured, "d"),
            Column("target calls", measured, "d"),
            *(Column(kind, measured) for kind in timeline.COLOURS),
            Column("all, with the host between", measured),
            Column("the compiled loop", measured),
        ),
        rows=[
            (
                run.label,
                run.num_tokens,
                run.target_calls,
                *(run.time_of(kind) / 1e3 or None for kind in timeline.COLOURS),
                run.total_us / 1e3,
                run.loop_us / 1e3,
            )
            for run in runs
        ],
        parts=("figure5",),
    )


FIGURE_1 = Item(
    name="figure1",
    title=_TITLE_1,
    parts=_parts_1,
    render=_render_1,
    unavailable=lambda setting: pairs.missing(_pair_for_text()),
)
FIGURE_5 = Item(
    name="figure5",
    title=_TITLE_5,
    parts=_parts_5,
    render=_render_5,
    unavailable=lambda setting: pairs.missing(pairs.ENDE),
)
