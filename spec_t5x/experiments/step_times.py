"""How long one call of a model takes: the measured c and verification cost."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spec_t5x import autoregressive, decode_state
from spec_t5x.decoding import DEFAULT_VERIFIER
from spec_t5x.distributions import Sampling
from spec_t5x.draws import RowStream
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft, Outcome, Target
from spec_t5x.outputs import row_keys
from spec_t5x.trees import Tree
from spec_t5x.types import PyTree
from spec_t5x.verifiers import TreeVerifier, Verifier


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
    """Measures on this device, with caches of the size that decoding uses.

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
    batch = jax.tree.leaves(inputs)[0].shape[0]
    nodes = verifier.num_nodes(gamma)
    tree = verifier.tree(gamma) if isinstance(verifier, TreeVerifier) else None
    start = functools.partial(
        decode_state.init, gamma=gamma, max_decode_len=max_decode_len, num_nodes=nodes
    )
    state = jax.jit(start)(
        target,
        draft,
        inputs,
        jnp.zeros((batch, 1), jnp.int32),
        RowStream(row_keys(jax.random.key(0), batch)),
    )
    programs = [
        functools.partial(_call_target, target, state.target_cache, new=1, calls=calls),
        functools.partial(_call_draft, draft, state, settings, gamma, tree, calls=calls),
        functools.partial(_call_target, target, state.target_cache, new=nodes, calls=calls),
    ]
    for program in programs:
        jax.block_until_ready(program())
    times = [[_milliseconds(program) / calls for program in programs] for _ in range(repeats)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return StepTimes(target=medians[0], draft=medians[1] / gamma, verification=medians[2])


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
    programs = [
        functools.partial(_call_target, target, cache, new=width, calls=calls) for width in widths
    ]
    for program in programs:
        jax.block_until_ready(program())
    times = [[_milliseconds(program) for program in programs] for _ in range(repeats)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return [median / medians[0] for median in medians]


@functools.partial(jax.jit, static_argnames=("new", "calls"))
def _call_target(model: Target, cache, new: int, calls: int):
    """``calls`` calls in a row, each fed with what the one before it predicted."""

    def call(_, carry):
        cache, tokens = carry
        logits, longer = model.score(cache, tokens)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return model.rollback(longer, cache.lengths), tokens

    tokens = jnp.zeros((cache.lengths.shape[0], new), jnp.int32)
    return jax.lax.fori_loop(0, calls, call, (cache, tokens))[1]


@functools.partial(jax.jit, static_argnames=("gamma", "tree", "calls"))
def _call_draft(draft: Draft, state, settings: Sampling, gamma: int, tree: Tree | None, calls: int):
    """``calls`` proposals in a row, each given the first token of the one before it."""
    lengths = jnp.ones_like(state.outputs.lengths)
    outcome = Outcome(lengths=lengths, num_accepted=jnp.zeros_like(lengths))

    def call(_, carry):
        draft_state, sequences = carry
        context = decode_state.make_context(state, settings, coupled=False)
        context = context.replace(
            sequences=sequences, lengths=lengths, draws=context.draws.at(lengths)
        )
        if tree is None:
            proposal, draft_state = draft.propose(draft_state, context, gamma)
            draft_state = draft.commit(draft_state, outcome)
        else:
            proposal, draft_state = draft.propose_tree(draft_state, context, tree)
            path = jnp.zeros((lengths.shape[0], gamma), jnp.int32)
            draft_state = draft.commit_tree(draft_state, outcome, path)
        # The text changes, so that nothing can be worked out once for all calls.
        return draft_state, sequences.at[:, 1].set(proposal.tokens[:, 0])

    start = (state.draft_state, state.outputs.sequences.at[:, 1].set(3))
    return jax.lax.fori_loop(0, calls, call, start)[1]


def _milliseconds(program) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program())
    return 1e3 * (time.perf_counter() - start)
