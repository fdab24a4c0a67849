"""Times of a target call, a draft step and a verification: the paper's c and T(m)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x import interfaces
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Cache, Draft, Outcome, Target
from spec_t5x.labs.theory import formulas
from spec_t5x.loops import compiled, decode_state
from spec_t5x.loops.decode_state import DEFAULT_VERIFIER, DecodeState, Loop
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.tuning.interleaving import Calls, interleaved
from spec_t5x.tuning.timed_calls import Timed, with_last
from spec_t5x.types import Array, Int, PyTree
from spec_t5x.verifiers import Verifier


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Milliseconds of a call over all rows of a batch, medians over repetitions."""

    # A target call over one new token of each row.
    target: float
    # A draft step: the time of a proposal over gamma.
    draft: float
    # A target call over all tokens that it verifies: gamma + 1 of each row, or a tree's nodes.
    verification: float

    @property
    def c(self) -> float:
        """Time of a draft step in target steps, the paper's cost coefficient (Definition 3.7)."""
        return self.draft / self.target

    @property
    def verification_cost(self) -> float:
        """Time of a verification in target steps; the paper assumes 1."""
        return self.verification / self.target

    def speed_up(self, alpha: float, gamma: int) -> float:
        """Returns Theorem 3.8's speed-up with the cost of verification."""
        return formulas.wall_time_improvement(alpha, gamma, self.c, self.verification_cost)

    def batch_speed_up(self, alpha: float, gamma: int, *, rows: int, length: int) -> float:
        """Returns the expected speed-up of a batch of ``rows`` rows with ``length`` tokens each."""
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
    """Measures the calls on this device, with caches of decoding's size and rows of half length.

    The three calls are timed in turn, nine times; the results are medians.

    Args:
      target, draft: as in decoding.
      inputs: the argument of ``prefill`` of target and draft.
      gamma: drafts per iteration, at least 1.
      max_decode_len: room for tokens, as in decoding.
      settings: sampling settings of both.
      verifier: decides how many tokens the target verifies, and whether in a tree.
    """
    loop = Loop(gamma=gamma, max_decode_len=max_decode_len, verifier=verifier)
    timed = Timed.half_way(target, draft, inputs, settings, loop)
    programs = target_calls(timed, 1), proposals(timed), target_calls(timed, loop.num_nodes)
    one, drafts, verification = np.median(interleaved(programs, 9), axis=0).tolist()
    return StepTimes(target=1e3 * one, draft=1e3 * drafts / gamma, verification=1e3 * verification)


def target_calls(timed: Timed, new: int) -> Calls:
    """Returns a program of target calls, each over ``new`` tokens of each row."""
    return lambda calls: _call_target(timed.target, timed.state.target_cache, new, calls)


def proposals(timed: Timed, *, scored: bool = False) -> Calls:
    """Returns a program that proposes ``loop.gamma`` drafts, or a tree, and accepts none.

    Proposals include the distributions that the verifier needs. If ``scored``, the target scores
    each proposal; with a tree verifier that is an ``InputError``.
    """
    loop = timed.loop
    if scored and loop.verifier.tree(loop.gamma) is not None:
        raise InputError("the verifier is a tree verifier: choose one that verifies chains")
    target = timed.target if scored else None
    return lambda calls: _call_draft(
        timed.draft, timed.state, timed.settings, calls, target=target, loop=loop
    )


@compiled.jit(static_argnames="new")
def _call_target(model: Target, cache: Cache, new: int, calls: Int[Array, ""] | int):
    """Makes ``calls`` target calls, each over tokens that depend on the last call's logits."""
    lengths = cache.lengths

    def call(_, carry):
        cache, tokens = carry
        logits, _, cache = model.score(cache, tokens)
        return model.rollback(cache, lengths), _after(logits, tokens, model.vocab_size)

    tokens = jnp.zeros((lengths.shape[0], new), jnp.int32)
    return jax.lax.fori_loop(0, calls, call, (cache, tokens))


@compiled.jit(static_argnames="loop")
def _call_draft(
    draft: Draft,
    state: DecodeState,
    settings: Sampling,
    calls: Int[Array, ""] | int,
    *,
    target: Target | None,
    loop: Loop,
):
    """Makes ``calls`` proposals, each after the last one's first token or the target's token."""
    gamma, tree, coupled = loop.gamma, loop.verifier.tree(loop.gamma), loop.verifier.coupled
    none_accepted = jnp.zeros_like(state.outputs.lengths)
    path = None if tree is None else jnp.zeros((none_accepted.shape[0], gamma), jnp.int32)

    def propose(draft_state, outputs):
        context = decode_state.make_context(state.replace(outputs=outputs), settings, coupled)
        size = gamma if tree is None else tree
        proposal, draft_state = interfaces.proposed(draft, draft_state, context, size)
        outcome = Outcome(lengths=outputs.lengths, num_accepted=none_accepted, path=path)
        return context, proposal, draft.commit(draft_state, outcome)

    def call(_, carry):
        draft_state, outputs, cache, _ = carry
        context, proposal, draft_state = propose(draft_state, outputs)
        tokens = proposal.tokens[:, 0]
        if target is not None:
            block = jnp.concatenate([context.last_tokens[:, None], proposal.tokens], axis=1)
            logits, _, cache = target.score(cache, block)
            cache = target.rollback(cache, outputs.lengths)
            tokens = _after(logits, block, target.vocab_size)[:, 0]
        return draft_state, with_last(outputs, tokens), cache, jax.tree.leaves(proposal)

    def leaves(draft_state, outputs):
        return jax.tree.leaves(propose(draft_state, outputs)[1])

    shapes = jax.eval_shape(leaves, state.draft_state, state.outputs)
    nothing = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes]
    # The whole proposal is carried: XLA would remove what is unused.
    carry = (state.draft_state, state.outputs, state.target_cache, nothing)
    return jax.lax.fori_loop(0, calls, call, carry)


def _after(logits, tokens, vocab_size: int):
    """Returns next tokens that depend on all logits, so that XLA keeps all of the call."""
    largest = jnp.max(logits, axis=-1)
    return jnp.where(jnp.isnan(largest), tokens, tokens + 1) % vocab_size
