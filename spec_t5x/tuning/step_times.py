"""How long one call of a model takes: the measured c and verification cost."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from spec_t5x import autoregressive, decode_state
from spec_t5x.decode_state import DecodeState
from spec_t5x.decoding import DEFAULT_VERIFIER
from spec_t5x.distributions import Sampling
from spec_t5x.draws import RowStream
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Cache, Draft, Outcome, Target
from spec_t5x.outputs import row_keys
from spec_t5x.trees import Tree
from spec_t5x.tuning.interleaving import Program, interleaved
from spec_t5x.types import EOS_ID, PAD_ID, Array, Int, PyTree
from spec_t5x.verifiers import TreeVerifier, Verifier

# A call of a program that makes so many calls in a row.
Calls = Callable[[int], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Milliseconds per call, medians over repetitions."""

    # The target over one new token for each row.
    target: float
    # The draft, for one of gamma proposals.
    draft: float
    # The target over all that it verifies: gamma + 1 new tokens, or a tree's nodes.
    verification: float

    @property
    def c(self) -> float:
        """The paper's cost coefficient (Definition 3.7)."""
        return self.draft / self.target

    @property
    def verification_cost(self) -> float:
        """Time of a verification in target steps; the paper assumes 1."""
        return self.verification / self.target


def measure_step_times(
    target: Target,
    draft: Draft,
    inputs: PyTree,
    *,
    gamma: int,
    max_decode_len: int,
    settings: Sampling,
    verifier: Verifier | TreeVerifier = DEFAULT_VERIFIER,
    repeats: int = 9,
    calls: int = 40,
) -> StepTimes:
    """Measures on this device, with caches of the size that decoding uses, half full.

    The three calls are timed in turn, ``repeats`` times over, so that a change of
    the machine's mood falls on all of them.

    Args:
      target, draft: as in decoding.
      inputs: what both ``prefill`` take.
      gamma: drafts per iteration.
      max_decode_len: room for tokens, as in decoding.
      settings: how both sample.
      verifier: says how many tokens the target verifies, and whether in a tree.
      repeats: timings of each call, of which the median is taken.
      calls: calls in one timing.
    """
    state = state_half_way(
        target,
        draft,
        inputs,
        gamma=gamma,
        max_decode_len=max_decode_len,
        verifier=verifier,
        length=max(max_decode_len // 2, 1),
    )
    programs = (
        target_calls(target, state.target_cache, new=1),
        draft_calls(draft, state, settings, gamma=gamma, verifier=verifier),
        target_calls(target, state.target_cache, new=verifier.num_nodes(gamma)),
    )
    one, drafts, verification = _medians(programs, repeats, calls)
    return StepTimes(target=1e3 * one, draft=1e3 * drafts / gamma, verification=1e3 * verification)


def measure_verification_costs(
    target: Target,
    inputs: PyTree,
    *,
    widths: Sequence[int],
    max_decode_len: int,
    repeats: int = 5,
    calls: int = 20,
) -> list[float]:
    """T(m): the time of one target call over m new tokens, in calls over one.

    The paper takes it to be 1 for all m (section 3.4). Timed in turn, as above.

    Args:
      target: as in decoding.
      inputs: what ``prefill`` takes.
      widths: numbers m of new tokens, the first of them 1.
      max_decode_len: room for tokens, as in decoding.
      repeats: timings of each call, of which the median is taken.
      calls: calls in one timing.

    Returns:
      A number for each width; the first is 1.

    Raises:
      InputError: the widths do not begin with 1.
    """
    if not widths or widths[0] != 1:
        raise InputError(f"widths are {tuple(widths)}: begin with 1, whose time is the unit")
    batch = jax.tree.leaves(inputs)[0].shape[0]
    cache = jax.jit(autoregressive.prefill, static_argnames="max_length")(
        target,
        inputs,
        jnp.zeros((batch, 1), jnp.int32),
        jnp.zeros(batch, jnp.int32),
        max_length=max_decode_len + max(widths),
    )
    cache = target.rollback(cache, jnp.full(batch, max(max_decode_len // 2, 1), jnp.int32))
    programs = [target_calls(target, cache, new=width) for width in widths]
    medians = _medians(programs, repeats, calls)
    return [median / medians[0] for median in medians]


def state_half_way(
    target: Target,
    draft: Draft,
    inputs: PyTree,
    *,
    gamma: int,
    max_decode_len: int,
    verifier: Verifier | TreeVerifier = DEFAULT_VERIFIER,
    length: int,
) -> DecodeState:
    """A state as decoding has it when each row holds ``length`` tokens, as different as can be.

    Its caches hold nothing, of which a call's time does not depend.

    Args:
      target, draft: as in decoding.
      inputs: what both ``prefill`` take.
      gamma: drafts per iteration at most.
      max_decode_len: room for tokens, as in decoding.
      verifier: says how many tokens the target verifies.
      length: at least 1, at most ``max_decode_len``.
    """
    batch = jax.tree.leaves(inputs)[0].shape[0]
    state = _jit_init(
        target,
        draft,
        inputs,
        jnp.zeros((batch, 1), jnp.int32),
        RowStream(row_keys(jax.random.key(0), batch)),
        gamma=gamma,
        max_decode_len=max_decode_len,
        num_nodes=verifier.num_nodes(gamma),
    )
    places = jnp.arange(state.outputs.sequences.shape[1])
    first = EOS_ID + 1
    text = jnp.where(places == 0, PAD_ID, first + places % max(draft.vocab_size - first, 1))
    lengths = jnp.full_like(state.outputs.lengths, length)
    outputs = state.outputs.replace(sequences=jnp.tile(text[None], (batch, 1)), lengths=lengths)
    return state.replace(outputs=outputs, target_cache=target.rollback(state.target_cache, lengths))


def target_calls(target: Target, cache: Cache, *, new: int) -> Calls:
    """Calls of the target over ``new`` tokens for each row, at the cache's length."""
    return lambda calls: _call_target(target, cache, new, calls)


def draft_calls(
    draft: Draft,
    state: DecodeState,
    settings: Sampling,
    *,
    gamma: int,
    verifier: Verifier | TreeVerifier = DEFAULT_VERIFIER,
) -> Calls:
    """Proposals of ``gamma`` drafts to follow the state's rows; none of them accepted.

    The state must have room for so many.
    """
    tree = verifier.tree(gamma) if isinstance(verifier, TreeVerifier) else None
    # What a draft has to catch up with, it does once.
    draft_state, _ = _call_draft(draft, state, settings, gamma, tree, 1)
    state = state.replace(draft_state=draft_state)
    return lambda calls: _call_draft(draft, state, settings, gamma, tree, calls)


_jit_init = jax.jit(decode_state.init, static_argnames=("gamma", "max_decode_len", "num_nodes"))


@functools.partial(jax.jit, static_argnames="new")
def _call_target(model: Target, cache: Cache, new: int, calls: Int[Array, ""] | int):
    """``calls`` calls in a row, each fed with what the one before it predicted."""

    def call(_, carry):
        cache, tokens = carry
        logits, longer = model.score(cache, tokens)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return model.rollback(longer, cache.lengths), tokens

    tokens = jnp.zeros((cache.lengths.shape[0], new), jnp.int32)
    return jax.lax.fori_loop(0, calls, call, (cache, tokens))[1]


@functools.partial(jax.jit, static_argnames=("gamma", "tree"))
def _call_draft(
    draft: Draft,
    state: DecodeState,
    settings: Sampling,
    gamma: int,
    tree: Tree | None,
    calls: Int[Array, ""] | int,
):
    """``calls`` proposals in a row, each given the first token of the one before it."""
    lengths = state.outputs.lengths
    rows = jnp.arange(lengths.shape[0])
    outcome = Outcome(lengths=lengths, num_accepted=jnp.zeros_like(lengths))

    def call(_, carry):
        draft_state, sequences = carry
        context = decode_state.make_context(state, settings, coupled=False)
        context = context.replace(sequences=sequences)
        if tree is None:
            proposal, draft_state = draft.propose(draft_state, context, gamma)
            draft_state = draft.commit(draft_state, outcome)
        else:
            proposal, draft_state = draft.propose_tree(draft_state, context, tree)
            path = jnp.zeros((lengths.shape[0], gamma), jnp.int32)
            draft_state = draft.commit_tree(draft_state, outcome, path)
        # The text changes, so that nothing can be worked out once for all calls.
        return draft_state, sequences.at[rows, lengths].set(proposal.tokens[:, 0])

    start = (state.draft_state, state.outputs.sequences)
    return jax.lax.fori_loop(0, calls, call, start)


def _medians(programs: Sequence[Calls], repeats: int, calls: int) -> list[float]:
    """Seconds of a call of each."""
    rounds = interleaved([Program(run=p, calls=calls) for p in programs], least=repeats)
    return [statistics.median(column) for column in rounds.T.tolist()]
