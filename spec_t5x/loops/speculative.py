"""Speculative decoding: Algorithm 1 of Leviathan et al. (2023), batched and compiled.

One iteration, for all rows at once:

    propose   the draft proposes up to gamma tokens
    score     ONE target call over the row's last token and the proposals
    verify    how many proposals stand, and the token that follows them
    commit    append them; set each row's length, which is all a rollback takes

Shapes are fixed, rows advance by 1 … gamma + 1 tokens at their own pace, and the
loop runs on the device until every row has ended.

With a ``Pace`` an iteration has as many drafts as pay, and where none do, plain steps (one
target call, no draft) take its place. That is two loops in a loop, in one program: a
conditional would copy the caches. Between plain steps and iterations the draft is made
ready: its prefill, which is its encoder, waits for the first iteration, and tokens that
plain steps wrote are fed to it when it is asked again.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_t5x.errors import InputError
from spec_t5x.interfaces import (
    Context,
    Draft,
    DraftState,
    Outcome,
    Proposal,
    Target,
    check_parts,
    check_positions,
    check_vocabularies,
    shown_to,
)
from spec_t5x.loops import autoregressive
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops import speculative_tree as tree_lib
from spec_t5x.loops.decode_state import (
    DEFAULT_VERIFIER,
    DecodeState,
    Iteration,
    Loop,
    Verified,
    done,
    emitted,
    if_wanted,
    init,
    make_context,
    prefill_draft,
    with_states,
)
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.pace import Pace
from spec_t5x.sampling.distributions import Sampling, standardize
from spec_t5x.sampling.draws import Stream
from spec_t5x.sampling.log_probs import token_log_probs
from spec_t5x.types import EOS_ID, Array, Bool, EndOfSequence, Float32, Int, Key, PyTree
from spec_t5x.verifiers import Verifier


def step(
    target: Target,
    draft: Draft,
    state: DecodeState,
    settings: Sampling,
    loop: Loop,
    *,
    limit: Int[Array, ""] | None = None,
) -> tuple[DecodeState, Iteration]:
    """One iteration of Algorithm 1: 1 to ``gamma + 1`` tokens for each live row.

    No row proposes more than ``limit``, which at a pace is the pace's; the draft is ready.
    """
    gamma, verifier = loop.gamma, loop.verifier
    old, pace, tree = state.outputs, state.pace, verifier.tree(gamma)
    limit = limit if pace is None else pace.limit()
    context = make_context(state, settings, verifier.coupled, limit)
    if tree is None:
        found = verify(target, draft, state.draft_state, context, state.stream, gamma, verifier)
    else:
        found = tree_lib.verify(target, draft, state.draft_state, context, state.stream, tree)

    tokens = emitted(found.drafts, found.verdict)
    log_probs = token_log_probs(found.logits, found.probs, tokens, settings, loop.rescale_log_probs)
    outputs, num_appended = outputs_lib.append(
        old, tokens, found.verdict.num_accepted + 1, log_probs, loop.eos_id
    )
    num_accepted = jnp.minimum(found.verdict.num_accepted, num_appended)
    outcome = Outcome(lengths=outputs.lengths, num_accepted=num_accepted)
    if tree is None:
        draft_state = draft.commit(found.draft_state, outcome)
    else:
        draft_state = draft.commit_tree(found.draft_state, outcome, found.verdict.path[:, 1:])
    iteration = Iteration(
        proposed=found.drafts,
        num_proposed=found.num_drafts,
        num_accepted=num_accepted,
        appended=tokens,
        num_appended=num_appended,
        ended=outputs.ended,
    )
    state = state.replace(
        outputs=outputs,
        target_cache=target.rollback(found.target_cache, outputs.lengths),
        draft_state=draft_state,
        target_states=with_states(state.target_states, found.states, old.lengths),
        stats=state.stats.add(
            live=~old.ended,
            num_proposed=found.num_proposed,
            num_accepted=num_accepted,
            num_appended=num_appended,
            # Where a draft entered the output or was replaced.
            num_verified=jnp.minimum(found.num_drafts, num_appended),
            beta=found.beta,
        ),
    )
    if pace is not None:
        longest = jnp.max(iteration.num_proposed) if tree is None else limit
        state = state.replace(pace=_charged(pace, iteration, ~old.ended, limit, longest))
    return state, iteration


def verify(
    target: Target,
    draft: Draft,
    draft_state: DraftState,
    context: Context,
    stream: Stream,
    gamma: int,
    verifier: Verifier,
) -> Verified:
    """Proposes, scores and verifies one chain of tokens for each row."""
    settings = context.settings
    proposal, draft_state = _propose(draft, draft_state, context, gamma)
    # An ended row shall not make the target's call longer.
    num_proposed = jnp.where(context.live, proposal.num_proposed, 0)
    block = jnp.concatenate([context.last_tokens[:, None], proposal.tokens], axis=1)
    cache = context.target_cache if proposal.target_cache is None else proposal.target_cache
    varies = draft.traits.varies or context.limit is not None
    num = 1 + jnp.max(num_proposed) if varies else None
    # ONE target call over as much of the block as the longest proposal needs.
    logits, states, cache = shown_to(draft, target).score(cache, block, num)
    logits = context.ruled(logits, proposal.tokens)
    probs = standardize(logits, settings)
    verdict = verifier(stream, context.lengths, proposal, logits, probs, settings)
    return Verified(
        drafts=proposal.tokens,
        num_drafts=num_proposed,
        num_proposed=num_proposed,
        verdict=verdict,
        logits=logits,
        probs=probs,
        states=states,
        beta=verifier.chances(proposal, logits, probs, settings, verdict),
        target_cache=cache,
        draft_state=draft_state,
    )


def _propose(draft: Draft, draft_state: DraftState, context: Context, gamma: int):
    """The draft's proposal, as far as it may be verified, and its state."""
    if gamma == 0:
        nothing = jnp.zeros((context.lengths.shape[0], 0), jnp.int32)
        return Proposal(nothing), draft_state
    proposal, draft_state = draft.propose(draft_state, context, gamma)
    proposal = proposal.checked()
    if context.limit is not None:
        counts = jnp.minimum(proposal.num_proposed, context.limit)
        proposal = proposal.replace(counts=counts)
    return proposal, draft_state


# At a pace, and at gamma 0


def plain_step(
    target: Target, draft: Draft, state: DecodeState, settings: Sampling, loop: Loop
) -> tuple[DecodeState, Iteration]:
    """One target call, one token for each row that has not ended; the draft is not asked.

    The token is that of ``autoregressive.step`` and of gamma = 0, seed for seed.
    """
    live, lengths = ~state.outputs.ended, state.outputs.lengths
    outputs, cache, states, tokens, num_appended = autoregressive.write_token(
        shown_to(draft, target),
        state.outputs,
        state.target_cache,
        state.stream,
        settings,
        coupled=loop.verifier.coupled,
        eos_id=loop.eos_id,
        rescale_log_probs=loop.rescale_log_probs,
    )
    state = state.replace(
        outputs=outputs,
        target_cache=cache,
        target_states=with_states(state.target_states, states, lengths),
        stats=state.stats.add_plain(live=live, num_appended=num_appended),
        pace=None if state.pace is None else state.pace.plain(_mean(num_appended, live)),
    )
    nothing = jnp.zeros_like(num_appended)
    return state, Iteration(
        proposed=jnp.zeros((tokens.shape[0], loop.gamma), jnp.int32),
        num_proposed=nothing,
        num_accepted=nothing,
        appended=jnp.pad(tokens, ((0, 0), (0, loop.gamma))),
        num_appended=num_appended,
        ended=outputs.ended,
    )


def prepare(
    draft: Draft,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    state: DecodeState,
    settings: Sampling,
    loop: Loop,
    *,
    has_state: Bool[Array, ""] | bool = False,
) -> DecodeState:
    """Brings the draft up to the text.

    ``has_state``: whether the draft's state is not to be made, though the pace asks for it.
    """
    pace = state.pace
    draft_state = if_wanted(
        ~(pace.prefilled | has_state),
        lambda _: prefill_draft(draft, inputs, prompts, loop),
        state.draft_state,
    )
    context = make_context(state, settings, loop.verifier.coupled)
    draft_state = draft.catch_up(draft_state, context, width=pace.largest + 1)
    return state.replace(draft_state=draft_state, pace=pace.made_ready())


def _charged(pace: Pace, iteration: Iteration, live: Bool[Array, "batch"], limit, longest) -> Pace:
    """The pace after an iteration with proposals of ``longest`` tokens at most."""
    accepted, appended = iteration.num_accepted[:, None], iteration.num_appended[:, None]
    positions = jnp.arange(pace.largest)[None, :]
    return pace.speculative(
        _mean(iteration.num_appended, live),
        longest=longest,
        limit=limit,
        accepted=jnp.sum(positions < accepted, axis=0),
        # Not where the row ended with a draft.
        refused=jnp.sum((positions == accepted) & (appended > accepted), axis=0),
    )


def _mean(num_appended: Int[Array, "batch"], live: Bool[Array, "batch"]) -> Float32[Array, ""]:
    """Tokens for each live row."""
    return jnp.sum(num_appended) / jnp.maximum(jnp.sum(live), 1).astype(jnp.float32)


# The loops


@outputs_lib.refuses_holes
@functools.partial(
    jax.jit,
    static_argnames=(
        "gamma",
        "max_decode_len",
        "num_decodes",
        "verifier",
        "eos_id",
        "rescale_log_probs",
    ),
)
def speculative_decode(
    target: Target,
    draft: Draft,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    rng: Key[Array, "*batch"] | Stream,
    settings: Sampling,
    *,
    gamma: int,
    max_decode_len: int,
    max_decode_steps: Int[Array, "*steps"] | None = None,
    num_decodes: int = 1,
    verifier: Verifier = DEFAULT_VERIFIER,
    eos_id: EndOfSequence = EOS_ID,
    rescale_log_probs: bool = True,
    pace: Pace | None = None,
) -> Decoded:
    """Decodes with the target's distribution, exactly, at the draft's pace.

    The text at temperature 0 is that of ``autoregressive_decode``; at any other the
    texts follow the same distribution. ``gamma = 0`` is plain decoding, seed for
    seed. Statistics come back for each sequence in ``Decoded.stats``.

    Args:
      target: the model whose output is wanted, a pytree.
      draft: what proposes; it must share the target's vocabulary.
      inputs: what both models' ``prefill`` take, e.g. tokens ``[batch, source]``.
      prompts: ``[batch, 1 + prompt length]``, the start token first, padded with 0
        on the right; ``zeros([batch, 1])`` where nothing is forced.
      rng: one key, or one for each input (``outputs.row_keys``); or a stream made for
        all rows (``draws.t5x_stream``).
      settings: the distribution to sample from (``distributions.sampling``).
      gamma: tokens proposed in each iteration at most, at least 0; with a tree, its
        depth.
      max_decode_len: room for tokens, the prompt's included.
      max_decode_steps: tokens to generate at most, after the prompt.
      num_decodes: sequences for each input.
      verifier: which proposals to keep (``verifiers.verifier``).
      eos_id: the token that ends a row, or several of them; in a prompt they do not.
      rescale_log_probs: whether scores are under the sampled distribution (T5X's
        default: argmax scores 0) or under the model's own.
      pace: drafts as many tokens as pay, ``gamma`` at most, and none where none pay
        (``loops/pace.py``); None drafts ``gamma`` to the end. ``Decoded.pace`` is what to decode
        the next batch with.

    Raises:
      InputError: ``gamma`` below 0, vocabularies that differ, prompts longer than
        ``max_decode_len``, a draft that needs more of the target than it shows, a stream
        that the verifier cannot draw from, or a pace with the costs of another gamma.
    """
    loop = Loop(
        gamma=gamma,
        max_decode_len=max_decode_len,
        num_decodes=num_decodes,
        verifier=verifier,
        eos_id=eos_id,
        rescale_log_probs=rescale_log_probs,
    )
    stream, settings = _checked(target, draft, prompts, rng, settings, loop, pace)
    state = init(
        target, draft, inputs, prompts, stream, loop, max_decode_steps=max_decode_steps, pace=pace
    )

    def iterate(state):
        return step(target, draft, state, settings, loop)[0]

    def go_plainly(state):
        return plain_step(target, draft, state, settings, loop)[0]

    def make_ready(state):
        return prepare(draft, inputs, prompts, state, settings, loop)

    body = iterate
    if pace is not None:
        body = alternation(
            lambda state: ~done(state),
            lambda state: state.pace.limit(),
            go_plainly,
            make_ready,
            iterate,
        )
    return _finish(lax.while_loop(lambda state: ~done(state), body, state), loop)


def alternation(
    going: Callable, limit: Callable, go_plainly: Callable, make_ready: Callable, iterate: Callable
) -> Callable:
    """The body of a loop at a pace: plain steps while the limit is 0, then iterations.

    All take what the loop carries; it goes on while ``going``.
    """

    def alternate(carry):
        carry = lax.while_loop(lambda c: going(c) & (limit(c) == 0), go_plainly, carry)
        # Making ready copies the draft's state.
        return if_wanted(going(carry), draft, carry)

    def draft(carry):
        return lax.while_loop(lambda c: going(c) & (limit(c) > 0), iterate, make_ready(carry))

    return alternate


def speculative_steps(
    target: Target,
    draft: Draft,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    rng: Key[Array, "*batch"] | Stream,
    settings: Sampling,
    *,
    max_decode_steps: Int[Array, "*steps"] | None = None,
    pace: Pace | None = None,
    **options,
) -> Iterator[Iteration]:
    """``speculative_decode``, driven from the host: yields after each iteration.

    For streaming and for traces. Same arguments (``options`` are the fields of ``Loop``), same
    text, same errors (at the call); slower by a round trip for each iteration. The prefill has
    run when the call returns. A plain step, at gamma 0 or at a pace, is an iteration without
    proposals. The generator's return value is the ``Decoded`` result; sent True, it ends all
    rows where they are.

    Raises:
      InputError: as of ``speculative_decode``, at the call; or a row's logits are not
        finite, before its tokens are yielded.
    """
    outputs_lib.check_whole(prompts)
    loop = Loop(**options)
    stream, settings = _checked(target, draft, prompts, rng, settings, loop, pace)
    begin = _compiled(init, loop, donate=())
    go_plainly, make_ready = _compiled(plain_step, loop), _compiled(prepare, loop)
    iterate = _compiled(step, loop) if loop.gamma else go_plainly

    # Of its own: what stands in a generator waits for the first ``next``.
    def iterations(state: DecodeState, ended: np.ndarray):
        ready = pace is None
        while not ended.all():
            if pace is not None and not _limit(state.pace):
                ready = False
                state, iteration = go_plainly(target, draft, state, settings)
            elif not ready:
                state, ready = make_ready(draft, inputs, prompts, state, settings), True
                continue
            else:
                state, iteration = iterate(target, draft, state, settings)
            # All that is fetched.
            iteration, scores = jax.device_get((iteration, state.outputs.scores))
            outputs_lib.check_sound(scores)
            if (yield iteration):
                break
            ended = iteration.ended
        return _finish(state, loop)

    state = begin(
        target, draft, inputs, prompts, stream, max_decode_steps=max_decode_steps, pace=pace
    )
    return iterations(state, np.asarray(state.outputs.ended))


_limit = jax.jit(Pace.limit)


@functools.cache
def _compiled(function: Callable, loop: Loop, donate: tuple[str, ...] = ("state",)) -> Callable:
    """A program of the stepper's. The state is donated: its caches are updated in place."""
    return jax.jit(functools.partial(function, loop=loop), donate_argnames=donate)


def _finish(state: DecodeState, loop: Loop) -> Decoded:
    pace = None if state.pace is None else state.pace.end_batch()
    return outputs_lib.finish(
        state.outputs, loop.num_decodes, loop.max_decode_len, state.stats, pace
    )


def _checked(
    target: Target,
    draft: Draft,
    prompts: Int[Array, "batch width"],
    rng: Key[Array, "*batch"] | Stream,
    settings: Sampling,
    loop: Loop,
    pace: Pace | None,
) -> tuple[Stream, Sampling]:
    """The stream and settings of all rows, of arguments that can be decoded with."""
    gamma, coupled = loop.gamma, loop.verifier.coupled
    check_arguments(target, draft, prompts, gamma, loop.max_decode_len)
    if pace is not None and pace.largest != gamma:
        raise InputError(f"gamma is {gamma} and the pace has costs up to {pace.largest}: give that")
    stream = outputs_lib.row_stream(
        rng, prompts.shape[0], loop.num_decodes, coupled, loop.max_decode_len
    )
    if loop.verifier.tree(gamma) is not None:
        tree_lib.check_tree(target, draft, stream)
    settings = settings.repeat(loop.num_decodes)
    return stream, settings.keep_ties() if coupled else settings


def check_arguments(target: Target, draft: Draft, prompts, gamma: int, max_decode_len: int):
    """Raises ``InputError`` for arguments that cannot be decoded with."""
    if gamma < 0:
        raise InputError(f"gamma is {gamma}: give at least 0 (0 is plain decoding)")
    check_parts(target)
    check_parts(draft, Draft)
    check_vocabularies(draft, target)
    depths = draft.traits.depths
    if draft.traits.uses_target_states and not target.state_size:
        raise InputError(
            f"{type(draft).__name__} needs the target's states and {type(target).__name__} has "
            "none (state_size is 0): use another draft"
        )
    if depths and not hasattr(target, "showing"):
        raise InputError(
            f"{type(draft).__name__} needs the states of the target's layers {list(depths)} "
            f"and {type(target).__name__} has no showing: use another draft"
        )
    outputs_lib.check_prompts(prompts, max_decode_len)
    check_positions(target, max_decode_len)
    draft.check(target, max_decode_len)
