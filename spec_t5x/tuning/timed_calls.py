"""Half-finished decoding, and programs that repeat one of its iterations, for timing."""

import copy
import dataclasses
import sys

import jax
import jax.numpy as jnp

from spec_t5x.interfaces import Draft, Target
from spec_t5x.loops import arguments, compiled, decode_state, speculative
from spec_t5x.loops.decode_state import DecodeState, Loop
from spec_t5x.loops.outputs import Outputs
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.tuning.interleaving import Calls
from spec_t5x.types import EOS_ID, PAD_ID, Array, Int, PyTree

# An id that no token has: rows do not end, so that all steps are alike.
NO_EOS = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """Half-finished decoding; its methods return programs that repeat a part of it."""

    target: Target
    draft: Draft
    inputs: PyTree
    state: DecodeState
    settings: Sampling
    loop: Loop

    @classmethod
    def half_way(
        cls,
        target: Target,
        draft: Draft,
        inputs: PyTree,
        settings: Sampling,
        loop: Loop,
        most: int = sys.maxsize,
    ) -> "Timed":
        """Makes the state of rows of ``loop.max_decode_len // 2`` varied tokens, at most ``most``.

        The tokens are not fed to the target, since a call's time does not depend on what its cache
        holds; the draft has been fed them. Errors are those of ``arguments.check``.
        """
        prompts, key = _no_prompts(inputs), jax.random.key(0)
        stream, settings = arguments.prepared(target, draft, prompts, key, settings, loop)
        loop = dataclasses.replace(loop, eos_id=NO_EOS)
        length = max(min(loop.max_decode_len // 2, most), 1)
        state = _half_way(target, draft, inputs, stream, settings, length, loop=loop)
        return cls(
            target=target, draft=draft, inputs=inputs, state=state, settings=settings, loop=loop
        )

    def iterations(self, limit: int | None = None) -> Calls:
        """Returns a program of iterations with ``limit`` drafts; 0 gives plain steps.

        If ``limit`` is None, an iteration has as many drafts as are proposed.
        """
        loop, limit = (self.loop.plain, None) if limit == 0 else (self.loop, limit)
        return lambda calls: _iterate(
            self.target, self.draft, self.state, self.settings, limit, calls, loop=loop
        )

    def prefills(self, calls: int) -> PyTree:
        """Runs the draft's prefill ``calls`` times; returns the last state, None for 0 calls."""
        state = None
        for _ in range(calls):
            state = _prefill(self.draft, self.inputs, loop=self.loop)
        return state


def _no_prompts(inputs: PyTree) -> Int[Array, "batch 1"]:
    """Returns start tokens alone, one for each input."""
    return jnp.zeros((jax.tree.leaves(inputs)[0].shape[0], 1), jnp.int32)


def _full(draft: Draft) -> Draft:
    """Returns a draft like this one that proposes exactly ``context.limit`` tokens."""

    def propose(self, state, context, gamma: int):
        proposal, state = draft.propose(state, context, gamma)
        return proposal.replace(counts=jnp.full_like(context.lengths, context.limit)), state

    full = copy.copy(draft)
    changed = type(type(draft).__name__, (type(draft),), {"propose": propose, "__slots__": ()})
    object.__setattr__(full, "__class__", changed)
    return full


@compiled.jit(static_argnames="loop")
def _half_way(target, draft, inputs, stream, settings, length, *, loop: Loop) -> DecodeState:
    state = decode_state.init(target, draft, inputs, _no_prompts(inputs), stream, loop)
    old = state.outputs
    places = jnp.arange(old.sequences.shape[1])
    first = EOS_ID + 1
    text = jnp.where(places == 0, PAD_ID, first + places % max(draft.vocab_size - first, 1))
    lengths = jnp.full_like(old.lengths, length)
    sequences = jnp.broadcast_to(text, old.sequences.shape).astype(old.sequences.dtype)
    state = state.replace(
        outputs=old.replace(sequences=sequences, lengths=lengths),
        target_cache=target.rollback(state.target_cache, lengths),
    )
    context = decode_state.make_context(state, settings, loop.verifier.coupled)
    draft_state = draft.catch_up(state.draft_state, context, width=loop.gamma + 1)
    return state.replace(draft_state=draft_state)


@compiled.jit(static_argnames="loop")
def _iterate(target, draft, state, settings, limit, calls, *, loop: Loop) -> DecodeState:
    """Runs ``calls`` iterations, each from the state's lengths."""
    if limit is not None and draft.traits.varies:
        draft = _full(draft)
    lengths = state.outputs.lengths

    def call(_, state):
        state, _ = speculative.step(target, draft, state, settings, loop, limit=limit)
        # Back to the lengths before, with the first appended token as each row's last one.
        tokens = state.outputs.sequences[jnp.arange(lengths.shape[0]), lengths + 1]
        outputs = state.outputs
        outputs = outputs.replace(lengths=lengths, ended=jnp.zeros_like(outputs.ended))
        return state.replace(
            outputs=with_last(outputs, tokens),
            target_cache=target.rollback(state.target_cache, lengths),
        )

    # The whole state is carried: XLA would remove what is unused.
    return jax.lax.fori_loop(0, calls, call, state)


@compiled.jit(static_argnames="loop")
def _prefill(draft, inputs, *, loop: Loop) -> PyTree:
    return decode_state.prefill_draft(draft, inputs, _no_prompts(inputs), loop)


def with_last(outputs: Outputs, tokens: Int[Array, "batch"]) -> Outputs:
    """Returns the outputs with each row's last token replaced, at the same lengths."""
    rows = jnp.arange(tokens.shape[0])
    return outputs.replace(
        sequences=outputs.sequences.at[rows, outputs.lengths].set(tokens),
        # No token is negative, but the compiler does not know: in every call it computes
        # again what depends on the lengths, as in decoding.
        lengths=outputs.lengths + (tokens < 0),
    )
