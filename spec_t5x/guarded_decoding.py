"""Speculative decoding under a guard: iterations, or plain steps where drafts do not pay.

Two loops in a loop, in one program: iterations for as long as the guard allows them, then
plain steps (one target call, no draft) until it allows them again. Between them the draft
is made ready: its prefill, which is its encoder, waits for the first iteration, and
tokens that plain steps wrote are fed to it when it is asked again. Both are charged to
the guard. Where drafts pay from the beginning to the end, each of this happens once, and
the inner loop is the one of ``decoding.py``.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x import outputs as outputs_lib
from spec_t5x.decode_state import DecodeState, Iteration, done, make_context, states_before
from spec_t5x.distributions import Sampling, standardize
from spec_t5x.draws import sample_next
from spec_t5x.guard import Guard
from spec_t5x.interfaces import Draft, DraftState, Target
from spec_t5x.scoring import token_log_probs
from spec_t5x.types import EOS_ID, Array, Bool, Float32, Int

# One iteration of a loop without a guard.
Step = Callable[[DecodeState], tuple[DecodeState, Iteration]]
# What the iteration took: drafts made, and tokens of a row that the target was called over.
Effort = Callable[[Iteration], tuple[Int[Array, ""] | int, Int[Array, ""] | int]]


@flax.struct.dataclass(kw_only=True)
class GuardedState:
    """What one iteration or plain step hands to the next."""

    state: DecodeState
    guard: Guard
    # Whether the draft's prefill was made; until then its state is zeros.
    prefilled: Bool[Array, ""]
    # Plain steps that the draft has not been told of.
    behind: Int[Array, ""]


def start(state: DecodeState, guard: Guard) -> GuardedState:
    """Before the first step; ``state`` comes from ``init`` without the draft's prefill.

    The guard is copied: the stepper donates what it is given, and this one is the caller's.
    """
    return GuardedState(
        state=state,
        guard=jax.tree.map(jnp.copy, guard),
        prefilled=jnp.asarray(False),
        behind=jnp.int32(0),
    )


def decode(
    target: Target,
    draft: Draft,
    guarded: GuardedState,
    settings: Sampling,
    step: Step,
    effort: Effort,
    prefill: Callable[[], DraftState],
    *,
    gamma: int,
    coupled: bool,
    **options,
) -> GuardedState:
    """Runs until every row has ended.

    Args:
      target, draft, settings: as in decoding.
      guarded: from ``start``.
      step: one iteration.
      effort: what it took.
      prefill: makes the draft's first state.
      gamma: drafts of a full proposal.
      coupled: whether the verifier is.
      options: ``plain_step``'s.
    """

    def speculates(guarded):
        return ~done(guarded.state) & allowed(draft, guarded, gamma)

    def is_plain(guarded):
        return ~done(guarded.state) & ~allowed(draft, guarded, gamma)

    def iterate(guarded):
        return speculative_step(guarded, step, effort, gamma=gamma)[0]

    def go_plainly(guarded):
        return plain_step(
            target, draft, guarded, settings, gamma=gamma, coupled=coupled, **options
        )[0]

    def alternate(guarded):
        guarded = lax.while_loop(is_plain, go_plainly, guarded)
        guarded = prepare(draft, guarded, settings, prefill, gamma=gamma, coupled=coupled)
        return lax.while_loop(speculates, iterate, guarded)

    return lax.while_loop(lambda guarded: ~done(guarded.state), alternate, guarded)


def allowed(draft: Draft, guarded: GuardedState, gamma: int) -> Bool[Array, ""]:
    """Whether the next step may be an iteration, once the draft is ready for it."""
    return guarded.guard.allows(gamma, _cost_to_be_ready(draft, guarded, gamma))


def prepare(
    draft: Draft,
    guarded: GuardedState,
    settings: Sampling,
    prefill: Callable[[], DraftState],
    *,
    gamma: int,
    coupled: bool,
) -> GuardedState:
    """Brings the draft up to the text; nothing where it is, or where all rows have ended."""
    state = guarded.state
    wanted = ~done(state)
    draft_state = lax.cond(
        wanted & ~guarded.prefilled, lambda _: prefill(), lambda kept: kept, state.draft_state
    )
    draft_state = draft.catch_up(
        draft_state, make_context(state, settings, coupled), width=gamma + 1
    )
    cost = jnp.where(wanted, _cost_to_be_ready(draft, guarded, gamma), 0.0)
    return guarded.replace(
        state=state.replace(draft_state=draft_state),
        guard=guarded.guard.pay(cost),
        prefilled=guarded.prefilled | wanted,
        behind=jnp.where(wanted, 0, guarded.behind),
    )


def speculative_step(
    guarded: GuardedState, step: Step, effort: Effort, *, gamma: int
) -> tuple[GuardedState, Iteration]:
    """One iteration, charged to the guard. The draft must be ready."""
    live = ~guarded.state.outputs.ended
    state, iteration = step(guarded.state)
    cost = guarded.guard.cost(gamma, *effort(iteration))
    guard = guarded.guard.add(_mean(iteration.num_appended, live), cost)
    return guarded.replace(state=state, guard=guard), iteration


def plain_step(
    target: Target,
    draft: Draft,
    guarded: GuardedState,
    settings: Sampling,
    *,
    gamma: int,
    coupled: bool,
    eos_id: int = EOS_ID,
    rescale_log_probs: bool = True,
) -> tuple[GuardedState, Iteration]:
    """One target call, one token for each row that has not ended; the draft is not asked.

    The token is that of ``autoregressive.step`` and of gamma = 0, seed for seed.
    """
    state, outputs = guarded.state, guarded.state.outputs
    live, block = ~outputs.ended, outputs.last_tokens[:, None]
    if draft.uses_target_states:
        logits, states, cache = target.score_states(state.target_cache, block)
    else:
        (logits, cache), states = target.score(state.target_cache, block), None
    probs = standardize(logits, settings)
    tokens = sample_next(state.stream, outputs.lengths, probs[:, 0], settings, coupled)[:, None]
    log_probs = token_log_probs(logits, probs, tokens, settings, rescale_log_probs)
    outputs, num_appended = outputs_lib.append(
        outputs, tokens, jnp.ones_like(tokens[:, 0]), log_probs, eos_id
    )
    state = state.replace(
        outputs=outputs,
        # An ended row keeps overwriting the same position.
        target_cache=target.rollback(cache, outputs.lengths),
        target_states=states_before(states, num_appended),
        stats=state.stats.add_plain(live=live, num_appended=num_appended),
    )
    guarded = guarded.replace(
        state=state,
        guard=guarded.guard.add(_mean(num_appended, live), 1.0),
        behind=guarded.behind + 1,
    )
    return guarded, _plain_iteration(tokens, num_appended, outputs.ended, gamma)


def _cost_to_be_ready(draft: Draft, guarded: GuardedState, gamma: int) -> Float32[Array, ""]:
    """Of the prefill that is still to come, and of the text that the draft lacks."""
    guard = guarded.guard
    cost = jnp.where(guarded.prefilled, 0.0, guard.prefill)
    if draft.keeps_text:
        # To the draft a call over gamma + 1 tokens is to one over a token what it is to
        # the target.
        calls = -(-guarded.behind // (gamma + 1))
        cost += calls * guard.draft_step * guard.verification
    return cost


def _mean(num_appended: Int[Array, "batch"], live: Bool[Array, "batch"]) -> Float32[Array, ""]:
    """Tokens for each live row."""
    return jnp.sum(num_appended) / jnp.maximum(jnp.sum(live), 1).astype(jnp.float32)


def _plain_iteration(tokens, num_appended, ended, gamma: int) -> Iteration:
    nothing = jnp.zeros_like(num_appended)
    return Iteration(
        proposed=jnp.zeros((tokens.shape[0], gamma), jnp.int32),
        num_proposed=nothing,
        num_accepted=nothing,
        appended=jnp.pad(tokens, ((0, 0), (0, gamma))),
        num_appended=num_appended,
        ended=ended,
    )
