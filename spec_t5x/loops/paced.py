"""Speculative decoding at a pace: iterations of as many drafts as pay, or plain steps.

Two loops in a loop, in one program: plain steps (one target call, no draft) for as long as
the pace asks for them, then iterations until it asks for plain steps again. Between them the
draft is made ready: its prefill, which is its encoder, waits for the first iteration, and
tokens that plain steps wrote are fed to it when it is asked again. Both are charged to the
pace. Where drafts pay from the beginning to the end, each of this happens once, and the
inner loop is the one of ``speculative.py``.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.interfaces import Draft, DraftState, Target
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops.decode_state import DecodeState, Iteration, done, make_context, states_before
from spec_t5x.loops.pace import Pace
from spec_t5x.sampling.distributions import Sampling, standardize
from spec_t5x.sampling.draws import sample_next
from spec_t5x.sampling.log_probs import token_log_probs
from spec_t5x.types import EOS_ID, Array, Bool, Float32, Int

# One iteration with at most ``limit`` drafts.
Step = Callable[[DecodeState, Int[Array, ""]], tuple[DecodeState, Iteration]]


@flax.struct.dataclass(kw_only=True)
class PacedState:
    """What one iteration or plain step hands to the next."""

    state: DecodeState
    pace: Pace
    # Whether the draft's prefill was made; until then its state is zeros.
    prefilled: Bool[Array, ""]
    # Plain steps that the draft has not been told of.
    behind: Int[Array, ""]


def start(state: DecodeState, pace: Pace) -> PacedState:
    """Before the first step; ``state`` comes from ``init`` without the draft's prefill.

    The pace is copied: the stepper donates what it is given, and this one is the caller's.
    """
    return PacedState(
        state=state,
        pace=jax.tree.map(jnp.copy, pace.new_batch()),
        prefilled=jnp.asarray(False),
        behind=jnp.int32(0),
    )


def decode(
    target: Target,
    draft: Draft,
    paced: PacedState,
    settings: Sampling,
    step: Step,
    prefill: Callable[[], DraftState],
    *,
    varies: bool,
    coupled: bool,
    **options,
) -> PacedState:
    """Runs until every row has ended.

    Args:
      target, draft, settings: as in decoding.
      paced: from ``start``.
      step: one iteration.
      prefill: makes the draft's first state.
      varies: whether proposals may be shorter than the limit.
      coupled: whether the verifier is.
      options: ``plain_step``'s.
    """

    def speculates(paced):
        return ~done(paced.state) & (next_limit(draft, paced) > 0)

    def is_plain(paced):
        return ~done(paced.state) & (next_limit(draft, paced) == 0)

    def iterate(paced):
        return speculative_step(draft, paced, step, varies=varies)[0]

    def go_plainly(paced):
        return plain_step(target, draft, paced, settings, coupled=coupled, **options)[0]

    def alternate(paced):
        paced = lax.while_loop(is_plain, go_plainly, paced)
        paced = prepare(draft, paced, settings, prefill, coupled=coupled)
        return lax.while_loop(speculates, iterate, paced)

    paced = lax.while_loop(lambda paced: ~done(paced.state), alternate, paced)
    return paced.replace(pace=paced.pace.end_batch())


def next_limit(draft: Draft, paced: PacedState) -> Int[Array, ""]:
    """Drafts of the next step at most, once the draft is ready for it; 0 is a plain step."""
    return paced.pace.limit(_cost_to_be_ready(draft, paced))


def prepare(
    draft: Draft,
    paced: PacedState,
    settings: Sampling,
    prefill: Callable[[], DraftState],
    *,
    coupled: bool,
) -> PacedState:
    """Brings the draft up to the text; nothing where it is, or where all rows have ended."""
    state = paced.state
    wanted = ~done(state)
    draft_state = lax.cond(
        wanted & ~paced.prefilled, lambda _: prefill(), lambda kept: kept, state.draft_state
    )
    draft_state = draft.catch_up(
        draft_state, make_context(state, settings, coupled), width=paced.pace.largest + 1
    )
    cost = jnp.where(wanted, _cost_to_be_ready(draft, paced), 0.0)
    return paced.replace(
        state=state.replace(draft_state=draft_state),
        pace=paced.pace.pay(cost),
        prefilled=paced.prefilled | wanted,
        behind=jnp.where(wanted, 0, paced.behind),
    )


def speculative_step(
    draft: Draft, paced: PacedState, step: Step, *, varies: bool
) -> tuple[PacedState, Iteration]:
    """One iteration, charged to the pace. The draft must be ready."""
    live, limit = ~paced.state.outputs.ended, next_limit(draft, paced)
    state, iteration = step(paced.state, limit)
    accepted, appended = iteration.num_accepted[:, None], iteration.num_appended[:, None]
    places = jnp.arange(paced.pace.largest)[None, :]
    pace = paced.pace.speculative(
        _mean(iteration.num_appended, live),
        longest=jnp.max(iteration.num_proposed) if varies else limit,
        limit=limit,
        accepted=jnp.sum(places < accepted, axis=0),
        # Not where the row ended with a draft.
        refused=jnp.sum((places == accepted) & (appended > accepted), axis=0),
        varies=varies,
    )
    return paced.replace(state=state, pace=pace), iteration


def plain_step(
    target: Target,
    draft: Draft,
    paced: PacedState,
    settings: Sampling,
    *,
    coupled: bool,
    eos_id: int = EOS_ID,
    rescale_log_probs: bool = True,
) -> tuple[PacedState, Iteration]:
    """One target call, one token for each row that has not ended; the draft is not asked.

    The token is that of ``autoregressive.step`` and of gamma = 0, seed for seed.
    """
    state, outputs = paced.state, paced.state.outputs
    live, block = ~outputs.ended, outputs.last_tokens[:, None]
    if draft.uses_target_states:
        logits, states, cache = target.score_states(state.target_cache, block)
    else:
        (logits, cache), states = target.score(state.target_cache, block), None
    probs = standardize(logits, settings)
    tokens = sample_next(state.stream, outputs.lengths, probs[:, 0], settings, coupled)[:, None]
    log_probs = token_log_probs(logits, probs, tokens, settings, rescale_log_probs)
    outputs, num_appended = outputs_lib.append(
        outputs, tokens, jnp.ones_like(tokens[:, 0]), log_probs, paced.pace.eos_id(eos_id)
    )
    state = state.replace(
        outputs=outputs,
        # An ended row keeps overwriting the same position.
        target_cache=target.rollback(cache, outputs.lengths),
        target_states=states_before(states, num_appended),
        stats=state.stats.add_plain(live=live, num_appended=num_appended),
    )
    paced = paced.replace(state=state, behind=paced.behind + 1)
    before = _cost_to_be_ready(draft, paced)
    pace = paced.pace.plain(_mean(num_appended, live), before)
    iteration = _plain_iteration(tokens, num_appended, outputs.ended, pace.largest)
    return paced.replace(pace=pace), iteration


def _cost_to_be_ready(draft: Draft, paced: PacedState) -> Float32[Array, ""]:
    """Of the prefill that is still to come, and of the text that the draft lacks."""
    pace = paced.pace
    cost = jnp.where(paced.prefilled, 0.0, pace.prefill)
    if draft.keeps_text:
        # One more draft at least costs a step of the draft and a position of the target's;
        # the draft is fed a block in about two steps' time.
        calls = -(-paced.behind // (pace.largest + 1))
        cost += calls * 2 * (pace.costs[-1] - pace.costs[0]) / pace.largest
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
