"""How long one call of a model takes: the measured c and verification cost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Cache, Draft, Outcome, Target
from spec_t5x.loops import decode_state
from spec_t5x.loops.decode_state import DEFAULT_VERIFIER, DecodeState, Loop
from spec_t5x.loops.outputs import Outputs, row_keys
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.draws import RowStream
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.theory import formulas
from spec_t5x.tuning.interleaving import Calls, interleaved
from spec_t5x.types import EOS_ID, PAD_ID, Array, Int, PyTree
from spec_t5x.verifiers import Verifier


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

    def speed_up(self, alpha: float, gamma: int, *, as_paper: bool = False) -> float:
        """Theorem 3.8 at these times; ``as_paper`` takes verification as one target step."""
        cost = 1.0 if as_paper else self.verification_cost
        return formulas.wall_time_improvement(alpha, gamma, self.c, cost)

    def batch_speed_up(self, alpha: float, gamma: int, *, rows: int, length: int) -> float:
        """The same for a batch whose rows have ``length`` tokens each, until the last is done."""
        iterations = formulas.expected_iterations(alpha, gamma, length, rows)
        return length / (
            iterations * formulas.iteration_time(gamma, self.c, self.verification_cost)
        )


def measure_step_times(
    target: Target,
    draft: Draft,
    inputs: PyTree,
    *,
    gamma: int,
    max_decode_len: int,
    settings: Sampling,
    verifier: Verifier = DEFAULT_VERIFIER,
) -> StepTimes:
    """Measures on this device, with caches of the size that decoding uses, half full.

    The three calls are timed in turn, several times over; the medians are taken.

    Args:
      target, draft: as in decoding.
      inputs: what both ``prefill`` take.
      gamma: drafts per iteration.
      max_decode_len: room for tokens, as in decoding.
      settings: how both sample.
      verifier: sets how many tokens the target verifies, and whether in a tree.
    """
    state = state_half_way(
        target, draft, inputs, gamma=gamma, max_decode_len=max_decode_len, verifier=verifier
    )
    programs = (
        target_calls(target, state.target_cache, new=1),
        draft_calls(draft, state, settings, gamma=gamma, verifier=verifier),
        target_calls(target, state.target_cache, new=verifier.num_nodes(gamma)),
    )
    one, drafts, verification = np.median(interleaved(programs, 9), axis=0).tolist()
    return StepTimes(target=1e3 * one, draft=1e3 * drafts / gamma, verification=1e3 * verification)


def state_half_way(
    target: Target,
    draft: Draft,
    inputs: PyTree,
    *,
    gamma: int,
    max_decode_len: int,
    verifier: Verifier,
) -> DecodeState:
    """A decoding state whose rows hold varied tokens, half of ``max_decode_len``.

    Its caches are empty: a call's time does not depend on their content. The arguments are
    ``measure_step_times``'.
    """
    batch = jax.tree.leaves(inputs)[0].shape[0]
    state = _jit_init(
        target,
        draft,
        inputs,
        jnp.zeros((batch, 1), jnp.int32),
        RowStream(row_keys(jax.random.key(0), batch)),
        loop=Loop(gamma=gamma, max_decode_len=max_decode_len, verifier=verifier),
    )
    places = jnp.arange(state.outputs.sequences.shape[1])
    first = EOS_ID + 1
    text = jnp.where(places == 0, PAD_ID, first + places % max(draft.vocab_size - first, 1))
    lengths = jnp.full_like(state.outputs.lengths, max(max_decode_len // 2, 1))
    outputs = state.outputs.replace(sequences=jnp.tile(text[None], (batch, 1)), lengths=lengths)
    return state.replace(outputs=outputs, target_cache=target.rollback(state.target_cache, lengths))


def target_calls(target: Target, cache: Cache, *, new: int) -> Calls:
    """Target calls over ``new`` tokens per row, at the cache's length."""
    return lambda calls: _call_target(target, cache, new, calls)


def draft_calls(
    draft: Draft,
    state: DecodeState,
    settings: Sampling,
    *,
    gamma: int,
    verifier: Verifier = DEFAULT_VERIFIER,
    target: Target | None = None,
) -> Calls:
    """Proposals of ``gamma`` drafts after the state's rows, none of them accepted.

    They include the distributions that the verifier needs. With a target, each proposal is
    scored, and the next one follows the target's token; chains only.
    """
    tree = verifier.tree(gamma)
    if tree is not None and target is not None:
        raise InputError("the verifier is a tree verifier: choose one of chains")
    options = {"gamma": gamma, "tree": tree, "coupled": verifier.coupled}
    return lambda calls: _call_draft(draft, state, settings, calls, target=target, **options)


_jit_init = jax.jit(decode_state.init, static_argnames="loop")


@functools.partial(jax.jit, static_argnames="new")
def _call_target(model: Target, cache: Cache, new: int, calls: Int[Array, ""] | int):
    """``calls`` calls in a row, each fed with what depends on the one before it."""
    lengths = cache.lengths

    def call(_, carry):
        cache, tokens = carry
        logits, _, cache = model.score(cache, tokens)
        return model.rollback(cache, lengths), _after(logits, tokens, model.vocab_size)

    tokens = jnp.zeros((lengths.shape[0], new), jnp.int32)
    return jax.lax.fori_loop(0, calls, call, (cache, tokens))


@functools.partial(jax.jit, static_argnames=("gamma", "tree", "coupled"))
def _call_draft(
    draft: Draft,
    state: DecodeState,
    settings: Sampling,
    calls: Int[Array, ""] | int,
    *,
    gamma: int,
    tree: Tree | None,
    coupled: bool,
    target: Target | None,
):
    """``calls`` proposals in a row, each following the first token of the one before it."""
    batch = state.outputs.lengths.shape[0]
    none_accepted = jnp.zeros(batch, jnp.int32)

    def propose(draft_state, context, outcome):
        if tree is None:
            proposal, draft_state = draft.propose(draft_state, context, gamma)
            return proposal, draft.commit(draft_state, outcome)
        proposal, draft_state = draft.propose_tree(draft_state, context, tree)
        path = jnp.zeros((batch, gamma), jnp.int32)
        return proposal, draft.commit_tree(draft_state, outcome, path)

    def call(_, carry):
        draft_state, outputs, cache, _ = carry
        context = decode_state.make_context(state.replace(outputs=outputs), settings, coupled)
        outcome = Outcome(lengths=outputs.lengths, num_accepted=none_accepted)
        proposal, draft_state = propose(draft_state, context, outcome)
        tokens = proposal.tokens[:, 0]
        if target is not None:
            block = jnp.concatenate([context.last_tokens[:, None], proposal.tokens], axis=1)
            logits, _, cache = target.score(cache, block)
            cache = target.rollback(cache, outputs.lengths)
            tokens = _after(logits, block, target.vocab_size)[:, 0]
        return draft_state, with_last(outputs, tokens), cache, jax.tree.leaves(proposal)

    # A draft catches up once, before the calls that are timed.
    context = decode_state.make_context(state, settings, coupled)
    draft_state = draft.catch_up(state.draft_state, context, width=gamma + 1)
    outcome = Outcome(lengths=state.outputs.lengths, num_accepted=none_accepted)

    def shapes_of(draft_state):
        return jax.tree.leaves(propose(draft_state, context, outcome)[0])

    nothing = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in jax.eval_shape(shapes_of, draft_state)]
    # The whole proposal is carried: XLA would remove what is unused.
    carry = (draft_state, state.outputs, state.target_cache, nothing)
    return jax.lax.fori_loop(0, calls, call, carry)


def _after(logits, tokens, vocab_size: int):
    """Tokens to feed next: uses all logits, at the least cost."""
    largest = jnp.max(logits, axis=-1)
    return jnp.where(jnp.isnan(largest), tokens, tokens + 1) % vocab_size


def with_last(outputs: Outputs, tokens: Int[Array, "batch"]) -> Outputs:
    """The same rows with another last token, for a loop at a fixed length."""
    rows = jnp.arange(tokens.shape[0])
    return outputs.replace(
        sequences=outputs.sequences.at[rows, outputs.lengths].set(tokens),
        # No token is negative, but the compiler does not know: in every call it computes
        # again what depends on the lengths, as in decoding.
        lengths=outputs.lengths + (tokens < 0),
    )
