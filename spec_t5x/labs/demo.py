"""Web page that compares plain and speculative decoding of one text: ``spec-t5x demo``.

In a notebook, ``demo.page().launch(share=False)`` shows it inline.

A *side* is one way of decoding. The sides decode the text in turn, two to seven times each. The
fastest run of each side, which excludes compilation, is replayed beside the other side's. A verdict
compares their speeds, and those of ``generate``, which decodes in one program.
"""

import dataclasses
import functools
import html
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spec_t5x import registry
from spec_t5x.checkpoints.make_draft import PACKAGED_DRAFTS
from spec_t5x.data.task_options import TRANSLATE_PREFIX
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator, StreamEvent
from spec_t5x.labs.benchmark.reliability import OtherPrograms, caution
from spec_t5x.machine.extras import imported
from spec_t5x.names import AUTO

# Characters of the longest text; the target may take less.
MAX_CHARACTERS = 1000
# Most runs of each side. Once each has had two, no run begins after so many seconds.
_RUNS, _ENOUGH = 7, 2.0
# Shortest and longest replay, in seconds.
_SHORTEST, _LONGEST = 2.5, 8.0
# Gamma, if none was given: a fixed one shows the draft at work in every iteration.
_GAMMA = 4
# A text, its target, and gamma.
_EXAMPLES = [
    [f"{TRANSLATE_PREFIX}The program reads the file and prints a warning.", "t5-target", _GAMMA],
    ["correct: Tom said he was going to by a new car when he have money.", "t5-target", _GAMMA],
]
_MARKS = {
    "accepted": "proposed by the draft and accepted",
    "corrected": "correction of a refused proposal",
    "own": "the target's own, with no proposal refused",
}
_HEADER = """<style>
#race .sides { display: grid; grid: auto / repeat(auto-fit, minmax(min(100%, 22em), 1fr)) }
#race .sides { gap: 16px; margin: 12px 0 16px; overflow-wrap: anywhere }
#race .side { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 12px }
#race .text { min-height: 5em; margin: 8px 0; font-size: 1.1em; line-height: 1.7 }
#race .side b { font-size: 1.2em; font-variant-numeric: tabular-nums }
#race .side span { margin-right: 1.2em; white-space: nowrap }
#race .alert { color: #b91c1c } .dark #race .alert { color: #fca5a5 } #race p { margin: 0 }
#race mark { color: inherit; border-radius: 3px; padding: 2px 0 }
#race .legend mark { padding: 2px 6px; font-size: .85em; line-height: 2 }
#race .accepted { background: #22c55e55 } #race .own { background: #3b82f655 }
#race .corrected { background: #f59e0b77; text-decoration: underline dotted }
#race .calls { display: flex; flex-wrap: wrap; gap: 10px 4px; margin-top: 8px }
#race .calls div { display: flex; flex-direction: column-reverse; gap: 2px; min-height: 76px }
#race .calls i { width: 18px; height: 13px; border-radius: 2px }
</style><h1>Speculative decoding</h1>
<p>A small draft proposes tokens and the target verifies them in one call. The output is the
target's own, in fewer calls. Each side runs alone several times, call by call; its fastest run is
shown, without compilation.</p>"""

# Events of plain and of speculative decoding, one for each target call.
Sides = tuple[list[StreamEvent], list[StreamEvent]]
# Seconds of ``generate`` without and with the draft.
Whole = tuple[float, float]
_track = threading.Lock()  # One race runs at a time.


def race(generator: Generator, text: str, options: GenerateOptions) -> Sides:
    """Streams the text plainly and speculatively several times; returns the fastest run of each.

    Raises:
      InputError: the generator has no draft, the text has more than ``MAX_CHARACTERS``, or
        text or options cannot be decoded.
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"the text has {len(text)} characters and the page takes {MAX_CHARACTERS}: shorten it"
        )
    if generator.draft is None:
        raise InputError("the target has no draft to compare with: give one")
    sides = ([], [])
    with _track:
        for way, events in _runs(generator, sides):
            again = list(way.stream(text, options))
            if not events or again[-1].seconds < events[-1].seconds:
                events[:] = again
    return sides


def whole(generator: Generator, text: str, options: GenerateOptions) -> Whole:
    """Times ``generate`` without and with the draft several times; returns the least of each."""
    seconds = ([], [])
    with _track:
        for way, times in _runs(generator, seconds):
            start = time.perf_counter()
            list(way.generate(text, options, batch_size=1))
            times.append(time.perf_counter() - start)
    return min(seconds[0]), min(seconds[1])


def _runs(generator: Generator, sides: tuple) -> Iterator[tuple[Generator, list]]:
    """Yields the generator without and with its draft in turn, each with its item of ``sides``."""
    for run in range(_RUNS):
        if run == 1:
            start = time.monotonic()
        elif run and time.monotonic() - start > _ENOUGH:
            return
        yield from zip((generator.plain(), generator), sides, strict=True)


def replay(sides: Sides) -> Iterator[Sides]:
    """Replays a race in ``_SHORTEST`` to ``_LONGEST`` seconds; yields both sides' events so far."""
    longest = max(events[-1].seconds for events in sides)
    slower = min(max(longest, _SHORTEST), _LONGEST) / longest
    order = sorted((event.seconds, n) for n, events in enumerate(sides) for event in events)
    shown, start = ([], []), time.monotonic()
    for seconds, n in order:
        time.sleep(max(start + slower * seconds - time.monotonic(), 0))
        shown[n].append(sides[n][len(shown[n])])
        yield shown


def verdict(sides: Sides, seconds: Whole, options: GenerateOptions, *, beside: float = 0.0) -> str:
    """Returns sentences: if both texts are identical, the two speed-ups, and doubts about them.

    ``seconds`` are ``whole``'s, ``beside`` is the share of the processors that others used.
    """
    plain, speculative = map(_ids, sides)
    if plain == speculative:
        found = "Both texts are identical."
    elif options.make_verifier().lossy and options.sampling().greedy:
        found = "The texts differ, as the verifier is lossy."
    elif options.make_verifier().lossy:
        found = "The texts are draws from two distributions, as the verifier is lossy."
    elif not options.repeats:
        found = "The texts are two draws from one distribution."
    else:
        found = "The texts differ from a token on whose logit is within rounding of another's."
    each = len(speculative) / len(sides[1])
    ratios = _rate(sides[1]) / _rate(sides[0]), seconds[0] / seconds[1]
    streamed, program = (
        f"{ratio:.2f} times as fast" if ratio >= 1 else f"slower, at {ratio:.2f} of the speed"
        for ratio in ratios
    )
    noise = plain == speculative and max(ratios) > each
    figures = (
        f"A target call brought {each:.2f} tokens: streamed call by call, speculative decoding "
        f"was {streamed}; as one program, as generate decodes, it was {program}."
    )
    doubts = caution([{"beside": beside, "noise": noise}])
    return " ".join(filter(None, (found, figures, doubts)))


def _ids(events: list[StreamEvent]) -> list[int]:
    return [token for event in events for token in event.appended]


def _rate(events: list[StreamEvent]) -> float:
    """Returns tokens per second; 0 without events."""
    return len(_ids(events)) / events[-1].seconds if events else 0.0


def _parts(event: StreamEvent) -> list[tuple[list[int], str]]:
    """Returns the ids that a target call appended, in two parts, each with a key of ``_MARKS``."""
    own = [] if event.own is None else [event.own]
    return [(event.accepted, "accepted"), (own, "corrected" if event.rejected else "own")]


def _coloured(events: list[StreamEvent], decode: Callable[[list[int]], str] | None) -> str:
    """Returns the text so far as HTML, coloured by the keys of ``_MARKS``."""
    # The text begins with the prefix of outputs, if there is one.
    ids, shown = [], html.escape(decode([])) if events else ""
    for event in events:
        for new, mark in _parts(event):
            start, why = len(decode(ids)), _MARKS[mark]
            ids += new
            if mark == "corrected":
                why = f"refused: {decode(event.rejected[:1])}"
            # Text that may still change is not shown yet.
            text = html.escape(decode(ids)[start : len(events[-1].text)])
            shown += f'<mark class="{mark}" title="{html.escape(why)}">{text}</mark>'
    return shown


def _side(title: str, events: list[StreamEvent], text: str) -> str:
    seconds = events[-1].seconds if events else 0.0
    return (
        f'<div class="side"><b>{title}</b><div class="text">{text}</div>'
        f"<span><b>{_rate(events):.1f}</b> tokens/s</span> "
        f"<span><b>{len(events)}</b> target calls</span> "
        f"<span><b>{seconds:.3f}</b> seconds</span></div>"
    )


def _chart(events: list[StreamEvent]) -> str:
    """Returns HTML of the legend, and of a column of token colours for each target call."""
    legend = " ".join(f'<mark class="{mark}">{why}</mark>' for mark, why in _MARKS.items())
    shown = ""
    for call, event in enumerate(events, 1):
        tokens = "".join(f'<i class="{mark}"></i>' * len(new) for new, mark in _parts(event))
        title = f"call {call}: {event.num_accepted} of {len(event.proposed)} proposals accepted"
        shown += f'<div title="{title}">{tokens}</div>'
    legend = f'<div class="legend">Tokens of each target call: {legend}</div>'
    return f'{legend}<div class="calls">{shown}</div>'


def _screen(status: str, sides: Sides = ([], []), decode=None, role: str = "status") -> str:
    """Returns the HTML below the button: status, both sides, and the chart of target calls."""
    plain, speculative = sides
    text = html.escape(plain[-1].text if plain else "")
    return (
        f'<p class="verdict {role}" role="{role}">{html.escape(status)}</p><div class="sides">'
        + _side("Plain decoding", plain, text)
        + _side("Speculative decoding", speculative, _coloured(speculative, decode))
        + f"</div>{_chart(speculative)}"
    )


def _screens(load: Callable[[], Generator], text: str, options: GenerateOptions) -> Iterator[str]:
    """Yields the HTML below the button while models are loaded and race; the verdict comes last."""
    yield _screen("Loading, compiling and decoding …")
    generator, others = load(), OtherPrograms()
    prefix = generator.prefix_ids(options)
    sides = race(generator, text, options)

    def decode(ids):
        return generator.vocabulary.decode(prefix + ids)

    seconds = whole(generator, text, options)
    found = verdict(sides, seconds, options, beside=others.share)
    for shown in replay(sides):
        yield _screen("Racing …", shown, decode)
    yield _screen(found, sides, decode)


def check_installed() -> None:
    """Raises ``InputError`` if gradio is not installed."""
    # Read by the import, and by launch: earlier versions take no such argument.
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False"}
    imported("gradio")


def page(
    generators: Mapping[str, Generator] | None = None, options: GenerateOptions | None = None
) -> Any:
    """Makes the page, a ``gradio.Blocks``.

    Args:
      generators: further targets with drafts, by name; the page lists them before the packaged.
      options: initial values of the controls, and all options that have no control.

    Raises:
      InputError: gradio is not installed.
    """
    check_installed()
    import gradio as gr

    generators, options = generators or {}, options or GenerateOptions(gamma=_GAMMA)
    drafts = dict.fromkeys(generators, ["its own"])
    drafts |= {name: [*kinds, "copy", "int8", "uniform"] for name, kinds in PACKAGED_DRAFTS.items()}
    first, names = next(iter(drafts)), registry.names("verifier")

    @functools.lru_cache(maxsize=3)  # Weights take memory.
    def load(target: str, draft: str) -> Generator:
        return generators[target] if target in generators else Generator.load(target, draft)

    def run(text, target, draft, verifier, gamma, auto, temperature, top_k):
        values = {"verifier": verifier, "gamma": AUTO if auto else gamma, "top_k": top_k}
        try:
            chosen = dataclasses.replace(options, temperature=float(temperature), **values)
            yield from _screens(functools.partial(load, target, draft), text, chosen)
        except InputError as error:
            yield _screen(str(error), role="alert")

    with gr.Blocks(title="Speculative decoding") as blocks, gr.Column(elem_id="race"):
        gr.HTML(_HEADER)
        text = gr.Textbox(_EXAMPLES[0][0], label="Text", lines=2, elem_id="text")
        with gr.Row():
            target = gr.Dropdown([*drafts], value=first, label="Target")
            draft = gr.Dropdown(drafts[first], label="Draft")
            verifier = gr.Dropdown([*names], value=options.verifier, label="Verifier")
        with gr.Row():
            number = _GAMMA if options.gamma == AUTO else options.gamma
            gamma = gr.Slider(0, max(16, number), number, step=1, label="Gamma", elem_id="gamma")
            auto = gr.Checkbox(options.gamma == AUTO, label="Gamma auto: as many drafts as pay")
            high, k = max(2, options.temperature), max(100, options.top_k)
            temperature = gr.Slider(0, high, options.temperature, step=0.1, label="Temperature")
            top_k = gr.Slider(0, k, options.top_k, step=1, label="Top-k (0: of all tokens)")
        gr.Examples(_EXAMPLES, [text, target, gamma])
        start = gr.Button("Race", variant="primary", elem_id="start")
        screen = gr.HTML(_screen(""))
        target.change(lambda name: gr.Dropdown(drafts[name], value=drafts[name][0]), target, draft)
        given = [text, target, draft, verifier, gamma, auto, temperature, top_k]
        how = {"show_progress": "hidden", "concurrency_limit": 1, "api_visibility": "private"}
        gr.on([start.click, text.submit], run, given, screen, **how)
    return blocks
