"""Speculative decoding: Algorithm 1 of Leviathan et al. (2023), batched and compiled.

One iteration, for all rows at once:

    propose   the draft proposes up to gamma tokens
    score     ONE target call over the row's last token and the proposals
    verify    finds how many proposed tokens are accepted, and the token that follows them
    commit    appends these tokens and sets each row's length, which also rolls the caches back

Shapes are fixed, each row advances by 1 … gamma + 1 tokens, independently of the others, and the
loop runs on the device until every row has ended.

A ``Pace`` chooses before each iteration how many tokens are drafted; if it chooses 0, a plain
step (one target call, no draft) replaces the iteration. The program then nests a loop of plain
steps and a loop of iterations in an outer one, since a conditional would copy the caches. The
draft's prefill waits for the first iteration; tokens of plain steps are fed to the draft later.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_t5x import interfaces
from spec_t5x.interfaces import Context, Draft, DraftState, Outcome, Target
from spec_t5x.loops import arguments, compiled, decode_state
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops import speculative_tree as tree_lib
from spec_t5x.loops.decode_state import DecodeState, Iteration, Loop, Verified, done, init
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.pace import Pace
from spec_t5x.sampling.distributions import Sampling, standardize
from spec_t5x.sampling.draws import Stream, sample_next
from spec_t5x.sampling.verification import Verdict
from spec_t5x.types import Array, Bool, Int, Key, PyTree
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
    """Runs one iteration of Algorithm 1: appends 1 to ``gamma + 1`` tokens to rows not ended.

    No row proposes more than ``limit`` tokens; a pace in the state replaces ``limit`` by its own,
    and needs a draft that ``prepare`` made ready. At gamma 0 (``loop.plain``) no draft is called.
    """
    gamma, verifier = loop.gamma, loop.verifier
    tree = verifier.tree(gamma) if gamma else None
    old, pace = state.outputs, state.pace
    limit = limit if pace is None else pace.limit
    context = decode_state.make_context(state, settings, verifier.coupled, limit)
    given = target, draft, state.draft_state, context, state.stream
    if not gamma:
        found = draw(*given, verifier.coupled)
    elif tree is None:
        found = verify(*given, gamma, verifier)
    else:
        found = tree_lib.verify(*given, tree, verifier)

    tokens = found.emitted
    log_probs = outputs_lib.token_log_probs(
        found.logits, found.probs, tokens, settings, loop.rescale_log_probs
    )
    outputs, num_appended = outputs_lib.append(
        old, tokens, found.verdict.num_accepted + 1, log_probs, loop.eos_id
    )
    num_accepted = jnp.minimum(found.verdict.num_accepted, num_appended)
    path = None if tree is None else found.verdict.path[:, 1:]
    outcome = Outcome(lengths=outputs.lengths, num_accepted=num_accepted, path=path)
    draft_state = draft.commit(found.draft_state, outcome) if gamma else found.draft_state
    iteration = Iteration(
        proposed=found.drafts,
        num_proposed=found.num_drafts,
        num_accepted=num_accepted,
        appended=tokens,
        num_appended=num_appended,
        ended=outputs.ended,
    )
    if pace is not None:
        longest = jnp.max(found.num_proposed) if tree is None else limit
        pace = pace.speculative(num_appended, longest, limit) if gamma else pace.plain(num_appended)
    state = state.replace(
        outputs=outputs,
        target_cache=target.rollback(found.target_cache, outputs.lengths),
        draft_state=draft_state,
        target_states=decode_state.with_states(state.target_states, found.states, old.lengths),
        stats=state.stats.add(found, iteration, ~old.ended, not gamma and pace is not None),
        pace=pace,
    )
    return state, iteration


def draw(
    target: Target,
    draft: Draft,
    draft_state: DraftState,
    context: Context,
    stream: Stream,
    coupled: bool,
) -> Verified:
    """Makes a plain step: scores each row's last token and draws the token after it."""
    batch, settings = context.lengths.shape[0], context.settings
    block = context.last_tokens[:, None]
    logits, states, cache = interfaces.shown_to(draft, target).score(context.target_cache, block)
    logits = context.ruled(logits, block[:, :0])
    probs = standardize(logits, settings)
    # The argmax of logits and of their one-hot distribution are the same.
    drawn_from = logits if settings.greedy else probs
    token = sample_next(stream, context.lengths, drawn_from[:, 0], settings, coupled)
    none = jnp.zeros(batch, jnp.int32)
    return Verified(
        drafts=block[:, :0],
        num_drafts=none,
        num_proposed=none,
        verdict=Verdict(num_accepted=none, next_token=token),
        logits=logits,
        probs=probs,
        states=states,
        beta=jnp.zeros((batch, 0), jnp.float32),
        target_cache=cache,
        draft_state=draft_state,
    )


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
    proposal, draft_state = interfaces.proposed(draft, draft_state, context, gamma)
    if context.limit is not None:
        proposal = proposal.replace(counts=jnp.minimum(proposal.num_proposed, context.limit))
    # An ended row must not make the target's call longer.
    num_proposed = jnp.where(context.live, proposal.num_proposed, 0)
    block = jnp.concatenate([context.last_tokens[:, None], proposal.tokens], axis=1)
    cache = context.target_cache if proposal.target_cache is None else proposal.target_cache
    varies = draft.traits.varies or context.limit is not None
    num = 1 + jnp.max(num_proposed) if varies else None
    # ONE target call over as much of the block as the longest proposal needs.
    logits, states, cache = interfaces.shown_to(draft, target).score(cache, block, num)
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


# Steps of a loop with a pace


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
    """Runs the draft's prefill if it has not run, then feeds the draft the tokens that it lacks.

    ``has_state`` is True if the draft's state exists although ``pace.prefilled`` is False.
    """
    pace = state.pace
    draft_state = decode_state.if_wanted(
        ~(pace.prefilled | has_state),
        lambda _: decode_state.prefill_draft(draft, inputs, prompts, loop),
        state.draft_state,
    )
    context = decode_state.make_context(state, settings, loop.verifier.coupled)
    draft_state = draft.catch_up(draft_state, context, width=pace.largest + 1)
    return state.replace(draft_state=draft_state, pace=pace.made_ready())


# The loops


@compiled.jit(
    check=arguments.check_given, static_argnames=[f.name for f in dataclasses.fields(Loop)]
)
def speculative_decode(
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
) -> Decoded:
    """Decodes speculatively; the output has exactly the target's distribution.

    At temperature 0 the tokens are those of ``autoregressive_decode``; otherwise they follow the
    same distribution. ``gamma=0`` is plain decoding, with the same random draws.
    ``Decoded.stats`` has the ``DecodeStats`` of each sequence.

    Args:
      target: the model whose output is wanted, a pytree.
      draft: proposes tokens; its vocabulary must be the target's.
      inputs: the argument of both models' ``prefill``, e.g. tokens ``[batch, source]``.
      prompts: ``[batch, 1 + prompt length]``, the start token first, padded with 0 on the right;
        ``zeros([batch, 1])`` for no prompt.
      rng: one key, or one for each input (``outputs.row_keys``); or a stream made for all rows
        (``draws.t5x_stream``).
      settings: the distribution to sample from (``distributions.sampling``).
      max_decode_steps: the most tokens to generate, one number or one for each input.
      pace: chooses how many tokens an iteration drafts, from 0 to ``gamma`` (``loops/pace.py``);
        None drafts ``gamma`` each time. ``Decoded.pace`` is the pace for the next batch.
      **options: ``gamma``, ``max_decode_len`` and the other fields of ``Loop``.

    Raises:
      InputError: ``gamma`` below 0, vocabularies that differ, prompts that are longer than
        ``max_decode_len`` or have padding before a token, models with fewer positions, a draft
        that needs states which the target does not return, a stream that the verifier cannot draw
        from, or a pace with the costs of another gamma.
    """
    loop = Loop(**options)
    stream, settings = arguments.prepared(target, draft, prompts, rng, settings, loop, pace)
    state = init(
        target, draft, inputs, prompts, stream, loop, max_decode_steps=max_decode_steps, pace=pace
    )
    state = drive(
        state,
        lambda state: ~done(state),
        lambda state: state.pace,
        lambda state, loop: step(target, draft, state, settings, loop)[0],
        lambda state: prepare(draft, inputs, prompts, state, settings, loop),
        loop,
    )
    return _finish(state, loop)


def drive(
    carry: PyTree, going: Callable, pace: Callable, iterate: Callable, prepare: Callable, loop: Loop
) -> PyTree:
    """Repeats ``iterate(carry, loop)`` in compiled loops while ``going(carry)``; returns the carry.

    ``pace(carry)`` is the ``Pace`` of the carry, or None. If the pace's limit is 0, ``iterate``
    gets ``loop.plain`` in place of ``loop``. ``prepare(carry)`` runs after these plain steps, and
    makes the draft ready to propose.
    """

    def run(carry, drafting: bool):
        def wanted(carry):
            return going(carry) & ((pace(carry).limit > 0) == drafting)

        chosen = loop if drafting else loop.plain
        return lax.while_loop(wanted, lambda carry: iterate(carry, chosen), carry)

    def alternate(carry):
        carry = run(carry, drafting=False)
        # ``prepare`` copies the draft's state, so it is left out once all rows have ended.
        return decode_state.if_wanted(
            going(carry), lambda carry: run(prepare(carry), drafting=True), carry
        )

    if pace(carry) is None:
        return lax.while_loop(going, lambda carry: iterate(carry, loop), carry)
    return lax.while_loop(going, alternate, carry)


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
    """Decodes as ``speculative_decode`` does, but from the host, and yields each iteration.

    Streaming and traces use this function. Arguments and tokens are the same; each iteration takes
    one more round trip to the host. The prefill has run when the call returns. A plain step,
    at gamma 0 or by a pace, is an iteration with 0 ``drafts``. The generator returns the
    ``Decoded`` result; ``send(True)`` makes it stop and return the rows as they are.

    Raises:
      InputError: as in ``speculative_decode``, at the call; or if a row's logits are not finite,
        before its tokens are yielded.
    """
    arguments.check_given(target, inputs, prompts, max_decode_steps, draft=draft, **options)
    loop = Loop(**options)
    stream, settings = arguments.prepared(target, draft, prompts, rng, settings, loop, pace)
    loop = loop if loop.gamma else loop.plain
    begin = _compiled(init, loop, donate=())
    go_plainly, iterate = _compiled(step, loop.plain), _compiled(step, loop)
    make_ready = _compiled(prepare, loop)

    # A nested generator, so that the checks above run at the call and not at the first ``next``.
    def iterations(state: DecodeState, ended: np.ndarray):
        ready = pace is None
        while not ended.all():
            if pace is not None and not state.pace.limit:
                ready = False
                state, iteration = go_plainly(target, draft, state, settings)
            elif not ready:
                state, ready = make_ready(draft, inputs, prompts, state, settings), True
                continue
            else:
                state, iteration = iterate(target, draft, state, settings)
            # One transfer for each iteration.
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


@functools.cache
def _compiled(function: Callable, loop: Loop, donate: tuple[str, ...] = ("state",)) -> Callable:
    """Returns ``function`` jitted for ``loop``; donates the state, to update caches in place."""
    return compiled.jit(functools.partial(function, loop=loop), donate_argnames=donate)


def _finish(state: DecodeState, loop: Loop) -> Decoded:
    pace = state.pace and state.pace.end_batch()
    return outputs_lib.finish(
        state.outputs, loop.num_decodes, loop.max_decode_len, state.stats, pace
    )
