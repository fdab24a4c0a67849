"""Figure 5: when each call of the target, of the draft and of the encoders ran, really.

The compiled loops are one program each, whose parts cannot be timed. Here the host calls
the same functions one after the other and waits for each, with the clock read before and
after. The text is that of the compiled loop, and this is checked. What the clock shows is
longer than in the loop: each block starts with a call from the host, and nothing overlaps.
The loop's own time stands beside it.

A block is one of

* an encoder call (of the target's model, of the draft's);
* a prefill: the source's keys and values, and empty caches; or, without an encoder, all
  that comes before the first token;
* a draft step: one token of a ``TransformerDraft``, the first of an iteration fed with two
  (``drafts.transformer`` says why). Other drafts' proposals are one block, gamma tokens;
* a target call: gamma + 1 tokens scored, verified and appended; or one, in plain decoding.
"""

import dataclasses
import functools
import io
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from spec_t5x.drafts.sequential import draw_token
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.generation import Batch, GenerateOptions, Generator
from spec_t5x.interfaces import Draft, DraftBase, Proposal, Target
from spec_t5x.loops import autoregressive, decode_state, speculative
from spec_t5x.loops.autoregressive import AutoregressiveState
from spec_t5x.loops.decode_state import DecodeState
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.draws import RowStream
from spec_t5x.types import Array, Float, Int
from spec_t5x.verifiers import TreeVerifier, Verifier

# Kinds of blocks and their colours, which are the paper's where it has the kind: "the purple
# blocks" call the target, "the blue blocks" the draft, yellow and orange are the encoders.
COLOURS = {
    "target": "#7e57c2",
    "draft": "#42a5f5",
    "target encoder": "#fdd835",
    "draft encoder": "#fb8c00",
    "prefill": "#9e9e9e",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """One block: a call that was waited for."""

    name: str
    # A key of ``COLOURS``.
    kind: str
    # Since the run began.
    start_us: float
    duration_us: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A row of the figure: one decode of the input."""

    # 0 is standard decoding.
    gamma: int
    events: tuple[Event, ...]
    num_tokens: int
    target_calls: int
    # Of the compiled loop, encoders and prefill included: the median.
    loop_us: float

    @property
    def label(self) -> str:
        """The row's name."""
        return f"gamma {self.gamma}" if self.gamma else "standard decoding"

    @property
    def total_us(self) -> float:
        """From the first block's start to the last one's end."""
        return max(event.start_us + event.duration_us for event in self.events)

    def time_of(self, kind: str) -> float:
        """Microseconds in blocks of a kind."""
        return sum((e.duration_us for e in self.events if e.kind == kind), start=0.0)

    def to_json(self) -> dict[str, Any]:
        """The run as JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Run":
        """The inverse of ``to_json``."""
        events = tuple(Event(**event) for event in values["events"])
        return cls(**{**values, "events": events})


def record(
    generator: Generator,
    text: str,
    options: GenerateOptions,
    gammas: Sequence[int] = (7, 3, 0),
    repeats: int = 5,
) -> list[Run]:
    """Decodes one input with each gamma, 0 for plain decoding, and times every block.

    Everything is compiled and run once before. Of ``repeats`` runs the one of median
    length is kept, as it was.

    Args:
      generator: with a draft, unless all of ``gammas`` are 0.
      text: the input.
      options: how to decode; ``gamma`` is taken from ``gammas``.
      gammas: the rows.
      repeats: runs of each.

    Raises:
      InputError: no draft, several decodes, a beam search or a tree, or an input that
        cannot be decoded.
      RuntimeError: the text is not the compiled loop's.
    """
    _check(generator, options, gammas)
    options = dataclasses.replace(options, batch_size=1)
    (batch,) = generator.batches([text], options)
    rows = [_Row(generator, batch, options, gamma) for gamma in gammas]
    # In turn, so that a machine that slows down slows all of them.
    for _ in range(repeats):
        for row in rows:
            row.repeat()
    return [row.median() for row in rows]


def _check(generator: Generator, options: GenerateOptions, gammas: Sequence[int]) -> None:
    if not gammas or min(gammas) < 0:
        raise InputError(f"gammas are {tuple(gammas)}: give some, each at least 0")
    if max(gammas) > 0 and generator.draft is None:
        raise InputError(f"gammas are {tuple(gammas)} and there is no draft: give one")
    if options.num_decodes != 1:
        raise InputError(f"num_decodes is {options.num_decodes}: a timeline shows 1")
    if options.beams:
        raise InputError(f"beams is {options.beams}: a timeline shows no beam search")
    if isinstance(options.make_verifier(), TreeVerifier):
        raise InputError(f"verifier is {options.verifier!r}: a timeline shows no tree of drafts")


class _Row:
    """One gamma: compiled and run once when made, then as often as asked."""

    def __init__(self, generator: Generator, batch: Batch, options: GenerateOptions, gamma: int):
        self.gamma, self.batch = gamma, batch
        self.options = dataclasses.replace(options, gamma=gamma)
        self.generator = generator if gamma else generator.plain()
        self.run = _run_speculative if gamma else _run_plain
        # Compiles, and is the text to compare with.
        decoded = jax.block_until_ready(self.generator.decode(batch, self.options))
        self.expected = decoded.tokens[0, 0, : decoded.lengths[0, 0]].tolist()
        self.run(_Clock(), self.generator, batch, self.options)
        self.clocks: list[_Clock] = []
        self.loop_times: list[float] = []

    def repeat(self) -> None:
        """Decodes once from the host and once by the compiled loop."""
        clock = _Clock()
        ids = self.run(clock, self.generator, self.batch, self.options)
        if ids != self.expected:
            raise RuntimeError(
                f"driven from the host, gamma {self.gamma} gave {ids}, not {self.expected}"
            )
        self.clocks.append(clock)
        self.loop_times.append(_loop_us(self.generator, self.batch, self.options))

    def median(self) -> Run:
        """The run of median length, as it was."""
        clocks = sorted(self.clocks, key=lambda clock: clock.total_us)
        events = clocks[len(clocks) // 2].events
        return Run(
            gamma=self.gamma,
            events=tuple(events),
            num_tokens=len(self.expected),
            target_calls=sum(event.kind == "target" for event in events),
            loop_us=statistics.median(self.loop_times),
        )


def _loop_us(generator: Generator, batch: Batch, options: GenerateOptions) -> float:
    start = time.perf_counter_ns()
    jax.block_until_ready(generator.decode(batch, options))
    return (time.perf_counter_ns() - start) / 1e3


class _Clock:
    """Calls functions, waits for what they return, and writes down when that was."""

    def __init__(self):
        self.start = time.perf_counter_ns()
        self.events: list[Event] = []

    @property
    def total_us(self) -> float:
        """When the last block ended."""
        return self.events[-1].start_us + self.events[-1].duration_us

    def call(self, name: str, kind: str, function: Callable, *args, **options):
        """What the function returns, once it is there."""
        start = time.perf_counter_ns()
        result = jax.block_until_ready(function(*args, **options))
        end = time.perf_counter_ns()
        event = Event(
            name=name,
            kind=kind,
            start_us=(start - self.start) / 1e3,
            duration_us=(end - start) / 1e3,
        )
        self.events.append(event)
        return result


def _run_plain(
    clock: _Clock, generator: Generator, batch: Batch, options: GenerateOptions
) -> list[int]:
    """Plain decoding, a block at a time; the text's ids."""
    target, coupled = generator.target, options.make_verifier().coupled
    state = clock.call(
        "prefill",
        "prefill",
        _plain_init,
        _encode(clock, target, batch, "target"),
        batch.tokens,
        batch.prompts,
        RowStream(batch.keys),
        max_decode_steps=batch.max_decode_steps,
        max_decode_len=options.max_decode_len,
    )
    while not _done(state):
        state = clock.call(
            "target call",
            "target",
            _plain_step,
            target,
            state,
            options.sampling(),
            coupled=coupled,
        )
    return _ids(state)


def _run_speculative(
    clock: _Clock, generator: Generator, batch: Batch, options: GenerateOptions
) -> list[int]:
    """Speculative decoding, a block at a time; the text's ids."""
    target, draft, settings = generator.target, generator.draft, options.sampling()
    encoded_target = _encode(clock, target, batch, "target")
    encoded_draft = draft
    if isinstance(draft, TransformerDraft):
        encoded_draft = draft.replace(model=_encode(clock, draft.model, batch, "draft"))
    state = clock.call(
        "prefill",
        "prefill",
        _speculative_init,
        encoded_target,
        encoded_draft,
        batch.tokens,
        batch.prompts,
        RowStream(batch.keys),
        max_decode_steps=batch.max_decode_steps,
        max_decode_len=options.max_decode_len,
        gamma=options.gamma,
    )
    verifier = options.make_verifier()
    common = {"gamma": options.gamma, "verifier": verifier}
    name = f"target call ({options.gamma + 1} tokens)"
    while not _done(state):
        proposed, draft_state = _propose(clock, draft, state, settings, **common)
        state = state.replace(draft_state=draft_state)
        state, _ = clock.call(name, "target", _verify, target, proposed, state, settings, **common)
    return _ids(state)


def _propose(
    clock: _Clock,
    draft: Draft,
    state: DecodeState,
    settings: Sampling,
    *,
    gamma: int,
    verifier: Verifier,
) -> tuple["_Proposed", Any]:
    """``draft.propose``, with a block for each step where the steps can be told apart."""
    coupled = verifier.coupled
    if not isinstance(draft, TransformerDraft) or draft.varies:
        proposal, draft_state = clock.call(
            f"proposal of {gamma}", "draft", _whole_proposal, draft, state, settings, gamma, coupled
        )
        return _Proposed(draft, (proposal,)), draft_state
    first, draft_state = clock.call(
        "draft step 1 (2 tokens)", "draft", _whole_proposal, draft, state, settings, 1, coupled
    )
    parts = [first]
    for offset in range(1, gamma):
        part, draft_state = clock.call(
            f"draft step {offset + 1}",
            "draft",
            _draft_step,
            draft,
            state.replace(draft_state=draft_state),
            parts[-1].tokens,
            settings,
            offset,
            coupled,
        )
        parts.append(part)
    return _Proposed(draft, tuple(parts)), draft_state


def _encode(clock: _Clock, model: Target, batch: Batch, whose: str) -> Target:
    """The model with its source encoded; itself where there is no encoder."""
    if not isinstance(model, T5Model):
        return model
    name = f"encoder of the {whose}"
    return _Encoded(model, clock.call(name, f"{whose} encoder", _call_encoder, model, batch.tokens))


def _done(state: AutoregressiveState | DecodeState) -> bool:
    # Fetched and looked at on the host: no program to start.
    return bool(np.all(state.outputs.ended))


def _ids(state: AutoregressiveState | DecodeState) -> list[int]:
    outputs = jax.device_get(state.outputs)
    return outputs.sequences[0, 1 : 1 + outputs.lengths[0]].tolist()


@flax.struct.dataclass
class _Encoded:
    """A T5 whose source has been encoded before."""

    model: T5Model
    encoded: Float[Array, "batch source embed"]

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def prefill(self, inputs, max_length: int):
        """The rest of ``T5Model.prefill``."""

        def empty_cache(module: Transformer, encoded, mask):
            return module.decoder.empty_cache(encoded, mask, max_length)

        variables = {"params": self.model.params}
        return self.model.module.apply(variables, self.encoded, inputs > 0, method=empty_cache)

    def score(self, cache, tokens):
        return self.model.score(cache, tokens)

    def rollback(self, cache, lengths):
        return self.model.rollback(cache, lengths)


@flax.struct.dataclass
class _Proposed(DraftBase):
    """A draft whose proposal has been made before."""

    draft: Draft
    # One after the other; the only one, or full.
    parts: tuple[Proposal, ...]

    @property
    def vocab_size(self) -> int:
        return self.draft.vocab_size

    @property
    def varies(self) -> bool:
        return self.draft.varies

    @property
    def uses_target_states(self) -> bool:
        return self.draft.uses_target_states

    def propose(self, state, context, gamma):
        if len(self.parts) == 1:
            return self.parts[0], state
        parts = [(part.tokens, part.probs) for part in self.parts]
        tokens, probs = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)
        return Proposal(tokens, probs, drawn=gamma), state

    def commit(self, state, outcome):
        return self.draft.commit(state, outcome)


@jax.jit
def _call_encoder(model: T5Model, tokens):
    return model.module.apply({"params": model.params}, tokens, method=Transformer.encode)


@functools.partial(jax.jit, static_argnames=("gamma", "coupled"))
def _whole_proposal(
    draft: Draft, state: DecodeState, settings: Sampling, gamma: int, coupled: bool
):
    context = decode_state.make_context(state, settings, coupled)
    return draft.propose(state.draft_state, context, gamma)


@functools.partial(jax.jit, static_argnames="coupled")
def _draft_step(
    draft: TransformerDraft,
    state: DecodeState,
    tokens: Int[Array, "batch 1"],
    settings: Sampling,
    offset,
    coupled: bool,
):
    """One step of ``drafts.sequential.draft_tokens``."""
    draws = decode_state.make_context(state, settings, coupled).draws
    settings = settings if draft.settings is None else draft.settings
    logits, cache = draft.model.score(state.draft_state.cache, tokens)
    token, probs, _ = draw_token(logits[:, 0], draws.replace(drawn=offset), settings)
    part = Proposal(token[:, None], None if probs is None else probs[:, None], drawn=1)
    return part, state.draft_state.replace(cache=cache)


# Caches are updated in place, as in the loops.
_plain_init = jax.jit(autoregressive.init, static_argnames="max_decode_len")
_plain_step = jax.jit(autoregressive.step, static_argnames=("coupled",), donate_argnames=("state",))
_speculative_init = jax.jit(decode_state.init, static_argnames=("gamma", "max_decode_len"))
_verify = jax.jit(
    speculative.step, static_argnames=("gamma", "verifier"), donate_argnames=("state",)
)


# --- as files ----------------------------------------------------------------


def draw(runs: Sequence[Run]) -> Figure:
    """The figure: a row for each run, a bar for each block."""
    figure = Figure(figsize=(11, 1.1 + 0.8 * len(runs)), layout="constrained")
    axes = figure.subplots()
    for row, run in enumerate(runs):
        for kind, colour in COLOURS.items():
            bars = [
                (event.start_us / 1e3, event.duration_us / 1e3)
                for event in run.events
                if event.kind == kind
            ]
            axes.broken_barh(
                bars, (row - 0.35, 0.7), color=colour, edgecolor="white", linewidth=0.4
            )
        note = f" {run.num_tokens} tokens, {run.target_calls} calls, {run.total_us / 1e3:.1f} ms"
        axes.text(run.total_us / 1e3, row, note, va="center", fontsize=8)
    axes.set_yticks(range(len(runs)), [run.label for run in runs])
    axes.invert_yaxis()
    # Room for the notes.
    axes.set_xlim(0, 1.3 * max(run.total_us for run in runs) / 1e3)
    axes.set_xlabel("milliseconds since the run began")
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [kind for kind in COLOURS if any(run.time_of(kind) for run in runs)]
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), frameon=False)
    return figure


def svg(runs: Sequence[Run]) -> str:
    """The figure as a picture that holds all it needs; the same bytes for the same runs."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "timeline"}):
        draw(runs).savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def chrome_trace(runs: Sequence[Run]) -> str:
    """JSON for ui.perfetto.dev or chrome://tracing: a process for each run.

    Complete events ("X") with ``ts`` and ``dur`` in microseconds, a thread for each kind of
    block (the Trace Event Format).
    """
    events = []
    for pid, run in enumerate(runs, 1):
        events.append(_metadata("process_name", pid, run.label))
        for tid, kind in enumerate(COLOURS, 1):
            events.append(_metadata("thread_name", pid, kind, tid))
            events.extend(
                {
                    "name": event.name,
                    "cat": kind,
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "ts": event.start_us,
                    "dur": event.duration_us,
                }
                for event in run.events
                if event.kind == kind
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n"


def _metadata(kind: str, pid: int, name: str, tid: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
