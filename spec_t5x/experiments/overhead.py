"""Speculation's own overhead: time of an iteration beyond its drafts and its verification.

Theorem 3.8 takes an iteration to last gamma draft steps and one call of the target. What
comes on top is making distributions of logits, the verdict, appending, statistics and
rolling back. A draft step is all that a draft does for a token, its sampling included, as
in c; a verification is the call of the target over gamma + 1 tokens, logits included.

All are timed as loops on the device over the same state: the same shapes, caches and
lengths, in turn, compilation apart. What is taken off an iteration is a loop of both, gamma
draft steps and a verification in alternation: where the weights of the two models are more
than the processor's cache holds, each drives the other's out, and either is quicker alone
than it can be in decoding. The times of either alone, which c and T(m) are made of, stand
beside it.

Of plain decoding the same: a step beyond the call of the target.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.make_draft import make_draft
from spec_t5x.errors import InputError
from spec_t5x.experiments.inputs import generator_of
from spec_t5x.generation import GenerateOptions
from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops import autoregressive, speculative
from spec_t5x.loops.autoregressive import AutoregressiveState
from spec_t5x.loops.decode_state import DecodeState
from spec_t5x.sampling.distributions import Sampling, sampling
from spec_t5x.tuning.interleaving import Program, compiled, interleaved
from spec_t5x.tuning.step_times import (
    Calls,
    draft_calls,
    state_half_way,
    target_calls,
    with_last,
)
from spec_t5x.types import Array, Int
from spec_t5x.verifiers import Verifier

HELP = "time of an iteration beyond its draft steps and its verification"

# No token ends a row: all iterations are alike.
_NO_EOS = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverheadOptions:
    """What to measure: every combination of a distribution and a batch size."""

    # Temperature, top_k and top_p of each distribution.
    distributions: tuple = ((0.0, 0, 0.0), (1.0, 0, 0.0), (1.0, 40, 0.0), (1.0, 0, 0.9))
    batch_sizes: tuple = (1, 8)
    # Encoder length, without padding.
    source_len: int = 64
    # Rounds of timings, of which medians are taken.
    repeats: int = 15
    seed: int = 0

    def __post_init__(self):
        for name in ("source_len", "repeats"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)!r}: give at least 1")
        for size in self.batch_sizes:
            if not isinstance(size, int) or size < 1:
                raise InputError(f"a batch size is {size!r}: give whole numbers from 1")
        for values in self.distributions:
            sampling(*values)


# As the command knows it (``cli.benchmark``).
Options = OverheadOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One distribution and batch size. Milliseconds of a call, of every round."""

    temperature: float
    top_k: int
    top_p: float
    batch_size: int
    gamma: int
    verifier: str
    iteration: list[float]
    # gamma draft steps and a verification.
    networks: list[float]
    # Either of them by itself.
    proposal: list[float]
    verification: list[float]
    plain_step: list[float]
    target_call: list[float]

    @property
    def overhead(self) -> float:
        """Milliseconds of an iteration beyond drafts and verification."""
        return _beyond(self.iteration, self.networks)

    @property
    def share(self) -> float:
        """Of the iteration."""
        return self.overhead / statistics.median(self.iteration)

    @property
    def share_range(self) -> tuple[float, float]:
        """Lower and upper quartile of the rounds' own shares."""
        iteration, networks = np.array([self.iteration, self.networks])
        shares = (iteration - networks) / iteration
        low, high = np.quantile(shares, [0.25, 0.75])
        return float(low), float(high)

    @property
    def plain_share(self) -> float:
        """Of a step of plain decoding, what is not the call of the target."""
        return _beyond(self.plain_step, self.target_call) / statistics.median(self.plain_step)

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return dataclasses.asdict(self) | {
            "overhead": self.overhead,
            "share": self.share,
            "share_range": list(self.share_range),
            "plain_share": self.plain_share,
        }


def _beyond(whole: list[float], part: list[float]) -> float:
    return statistics.median(whole) - statistics.median(part)


def run(
    options: OverheadOptions,
    report: Callable[[int, int, str], None] | None = None,
    *,
    models: Any,
    decoding: GenerateOptions | None = None,
) -> Iterator[Row]:
    """Measures row after row.

    Args:
      options: what to measure.
      report: ``report(done, total, what)`` is told of each row.
      models: the target and its draft (``cli.settings.Models``).
      decoding: gamma, the verifier, room for tokens, of which half are taken to be written.

    Raises:
      InputError: no gamma, or a verifier of trees.
    """
    decoding = decoding or GenerateOptions()
    verifier = speculative.make_verifier()
    if not isinstance(speculative.gamma, int) or speculative.gamma == 0:
        raise InputError(f"gamma is {speculative.gamma}: give at least 1")
    if verifier.tree(1) is not None:
        raise InputError(f"verifier is {speculative.verifier!r}: choose one of chains")
    draft_options = models.draft_options()
    loaded = load(models.target, dtype=draft_options.dtype, vocabulary=models.vocabulary)
    target = generator_of(loaded).target
    draft = make_draft(models.draft_name(), loaded, target, draft_options)
    rows = [(size, values) for size in options.batch_sizes for values in options.distributions]
    for done, (batch_size, values) in enumerate(rows):
        if report:
            report(done, len(rows), f"batch {batch_size}, temperature {values[0]:g}")
        sources = _sources(batch_size, options, target.vocab_size)
        times = measure(target, draft, sources, sampling(*values), decoding, options.repeats)
        temperature, top_k, top_p = values
        yield Row(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            batch_size=batch_size,
            gamma=speculative.gamma,
            verifier=speculative.verifier,
            **times,
        )
        jax.clear_caches()


def measure(
    target: Target,
    draft: Draft,
    sources: Int[Array, "batch source"],
    settings: Sampling,
    decoding: GenerateOptions,
    repeats: int,
) -> dict[str, list[float]]:
    """Milliseconds of each part, by name, of every round."""
    gamma, verifier = speculative.gamma, speculative.make_verifier()
    state = state_half_way(
        target,
        draft,
        sources,
        gamma=gamma,
        max_decode_len=speculative.max_decode_len,
        verifier=verifier,
        length=max(speculative.max_decode_len // 2, 1),
    )
    options = {"gamma": gamma, "verifier": verifier}
    programs = {
        "iteration": iteration_calls(target, draft, state, settings, **options),
        "networks": draft_calls(draft, state, settings, target=target, **options),
        "proposal": draft_calls(draft, state, settings, **options),
        "verification": target_calls(target, state.target_cache, new=gamma + 1),
        "plain_step": plain_calls(target, state, settings),
        "target_call": target_calls(target, state.target_cache, new=1),
    }
    ready, _ = compiled([Program(run=run) for run in programs.values()])
    rounds = 1e3 * interleaved(ready, least=repeats, most=repeats)
    return dict(zip(programs, rounds.T.tolist(), strict=True))


def iteration_calls(
    target: Target,
    draft: Draft,
    state: DecodeState,
    settings: Sampling,
    *,
    gamma: int,
    verifier: Verifier,
) -> Calls:
    """Iterations in a row, each from the state's lengths on."""
    return lambda calls: _iterate(
        target, draft, state, settings, calls, gamma=gamma, verifier=verifier
    )


def plain_calls(target: Target, state: DecodeState, settings: Sampling) -> Calls:
    """Steps of plain decoding in a row, each from the state's lengths on."""
    plain = AutoregressiveState(
        outputs=state.outputs, cache=state.target_cache, stream=state.stream
    )
    return lambda calls: _step_plainly(target, plain, settings, calls)


@functools.partial(jax.jit, static_argnames=("gamma", "verifier"))
def _iterate(target, draft, state, settings, calls, *, gamma: int, verifier: Verifier):
    lengths = state.outputs.lengths

    def call(_, state):
        state, _ = speculative.step(
            target, draft, state, settings, gamma=gamma, verifier=verifier, eos_id=_NO_EOS
        )
        outputs = _back_to(state.outputs, lengths)
        return state.replace(
            outputs=outputs, target_cache=target.rollback(state.target_cache, outputs.lengths)
        )

    # All of it: what is not asked for would not be worked out.
    return jax.lax.fori_loop(0, calls, call, state)


@jax.jit
def _step_plainly(target, state, settings, calls):
    lengths = state.outputs.lengths

    def call(_, state):
        state = autoregressive.step(target, state, settings, eos_id=_NO_EOS)
        outputs = _back_to(state.outputs, lengths)
        return state.replace(outputs=outputs, cache=target.rollback(state.cache, outputs.lengths))

    return jax.lax.fori_loop(0, calls, call, state)


def _back_to(outputs, lengths: Int[Array, "batch"]):
    """Rows of these lengths, whose last token is the first one that was appended."""
    tokens = outputs.sequences[jnp.arange(lengths.shape[0]), lengths + 1]
    outputs = outputs.replace(lengths=lengths, ended=jnp.zeros_like(outputs.ended))
    return with_last(outputs, tokens)


def _sources(batch_size: int, options: OverheadOptions, vocab_size: int):
    """Random ids, no padding among them."""
    rng = np.random.default_rng(options.seed)
    ids = rng.integers(3, min(vocab_size, 1000), (batch_size, options.source_len))
    return jnp.asarray(ids, jnp.int32)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| batch | temp. | top-k | top-p | gamma | iteration | both networks¹ | overhead "
        "| of the iteration | quartiles | drafts alone | verification alone | plain step "
        "| of it beyond the call |",
        "|" + "---|" * 14,
    ]
    for row in rows:
        low, high = row.share_range
        iteration, networks, drafts, verification, plain = map(
            statistics.median,
            (row.iteration, row.networks, row.proposal, row.verification, row.plain_step),
        )
        lines.append(
            f"| {row.batch_size} | {row.temperature:g} | {row.top_k or '—'} | {row.top_p or '—'} "
            f"| {row.gamma} | {iteration:.3f} | {networks:.3f} | {row.overhead:.3f} "
            f"| {row.share:.1%} | {low:.1%} to {high:.1%} | {drafts:.3f} | {verification:.3f} "
            f"| {plain:.3f} | {row.plain_share:.1%} |"
        )
    lines += [
        "",
        "Times in ms, medians. ¹ gamma draft steps, their sampling included, and the target's "
        "call over gamma + 1 tokens, in alternation.",
    ]
    return "\n".join(lines)


def to_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """What JSON can hold."""
    return {"rows": [row.to_dict() for row in rows]}
