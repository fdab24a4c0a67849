"""Speculative decoding: Algorithm 1 of Leviathan et al. (2023), batched and compiled.

One iteration, for all rows at once:

    propose   the draft proposes up to gamma tokens
    score     ONE target call over the row's last token and the proposals
    verify    how many proposals stand, and the token that follows them
    commit    append them; set each row's length, which is all a rollback takes

Shapes are fixed, rows advance by 1 … gamma + 1 tokens at their own pace, and the
loop runs on the device until every row has ended.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_t5x.errors import InputError
from spec_t5x.interfaces import (
    Cache,
    Context,
    Draft,
    DraftState,
    Outcome,
    PartialTarget,
    Proposal,
    StatefulTarget,
    Target,
    check_positions,
)
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops import paced as paced_lib
from spec_t5x.loops import tree as tree_lib
from spec_t5x.loops.decode_state import (
    DecodeState,
    DecodeStats,
    Iteration,
    done,
    emitted,
    init,
    make_context,
    prefill_draft,
    states_before,
)
from spec_t5x.loops.outputs import Decoded
from spec_t5x.loops.pace import Pace
from spec_t5x.loops.paced import PacedState
from spec_t5x.sampling.distributions import Sampling, standardize
from spec_t5x.sampling.draws import Stream
from spec_t5x.sampling.log_probs import token_log_probs
from spec_t5x.types import EOS_ID, Array, Bool, Int, Key, PyTree
from spec_t5x.verifiers import BlockVerifier, TreeVerifier, Verifier

__all__ = [
    "DEFAULT_VERIFIER",
    "DecodeState",
    "DecodeStats",
    "Iteration",
    "call_widths",
    "check_arguments",
    "done",
    "init",
    "speculative_decode",
    "speculative_steps",
    "step",
]

DEFAULT_VERIFIER = BlockVerifier()


def step(
    target: Target,
    draft: Draft,
    state: DecodeState,
    settings: Sampling,
    *,
    gamma: int,
    verifier: Verifier = DEFAULT_VERIFIER,
    eos_id: Int[Array, ""] | int = EOS_ID,
    rescale_log_probs: bool = True,
    limit: Int[Array, ""] | None = None,
    fill: Bool[Array, ""] | None = None,
) -> tuple[DecodeState, Iteration]:
    """One iteration of Algorithm 1: 1 to ``gamma + 1`` tokens for each live row.

    With a ``limit`` no row proposes more; where ``fill`` is true all propose as many,
    whatever stands there, to measure what that costs.
    """
    outputs = state.outputs
    context = make_context(state, settings, verifier.coupled, limit)
    proposal, draft_state = _propose(draft, state.draft_state, context, gamma, fill)
    # An ended row shall not make the target's call longer.
    num_proposed = jnp.where(outputs.ended, 0, proposal.num_proposed)
    block = jnp.concatenate([outputs.last_tokens[:, None], proposal.tokens], axis=1)
    cache = state.target_cache if proposal.target_cache is None else proposal.target_cache
    longest = jnp.max(num_proposed) if draft.varies or limit is not None else None
    logits, states, target_cache = _score(target, draft, cache, block, longest)
    target_probs = standardize(logits, settings)

    verdict = verifier(state.stream, outputs.lengths, proposal, logits, target_probs, settings)
    tokens = emitted(proposal.tokens, verdict)
    log_probs = token_log_probs(logits, target_probs, tokens, settings, rescale_log_probs)
    outputs, num_appended = outputs_lib.append(
        outputs, tokens, verdict.num_accepted + 1, log_probs, eos_id
    )
    num_accepted = jnp.minimum(verdict.num_accepted, num_appended)
    positions = jnp.arange(gamma)[None, :]

    state = state.replace(
        outputs=outputs,
        target_cache=target.rollback(target_cache, outputs.lengths),
        draft_state=draft.commit(
            draft_state, Outcome(lengths=outputs.lengths, num_accepted=num_accepted)
        ),
        target_states=states_before(states, num_appended),
        stats=state.stats.add(
            live=~state.outputs.ended,
            num_proposed=num_proposed,
            num_accepted=num_accepted,
            num_appended=num_appended,
            # A position was verified when its draft entered the output or was replaced.
            verified=positions < jnp.minimum(num_appended, num_proposed)[:, None],
            beta=verifier.chances(proposal, logits, target_probs, settings, verdict),
        ),
    )
    return state, Iteration(
        proposed=proposal.tokens,
        num_proposed=num_proposed,
        num_accepted=num_accepted,
        appended=tokens,
        num_appended=num_appended,
        ended=outputs.ended,
    )


def _propose(draft: Draft, draft_state: DraftState, context: Context, gamma: int, fill):
    """The draft's proposal, as far as it may be verified, and its state."""
    if gamma == 0:
        return Proposal(jnp.zeros((context.lengths.shape[0], 0), jnp.int32)), draft_state
    proposal, draft_state = draft.propose(draft_state, context, gamma)
    proposal = proposal.checked(draft.max_proposal)
    if context.limit is not None:
        counts = jnp.minimum(proposal.num_proposed, context.limit)
        if fill is not None:
            counts = jnp.where(fill, context.limit, counts)
        proposal = proposal.replace(counts=counts)
    return proposal, draft_state


def _score(target: Target, draft: Draft, cache: Cache, block: Int[Array, "batch new"], longest):
    """ONE target call over as much of the block as the longest proposal needs.

    ``longest`` is None where every proposal fills the block. Returns the logits at all
    positions (of no meaning beyond the longest proposal), the target's states (None unless
    the draft uses them) and the cache.
    """
    if longest is not None and _scores_parts(target):
        logits, states, cache = target.score_part(cache, block, longest + 1)
        return logits, states if draft.uses_target_states else None, cache

    def call(width, cache, block):
        tokens = block[:, :width]
        if draft.uses_target_states:
            logits, states, cache = target.score_states(cache, tokens)
            return _pad(logits, block), _pad(states, block), cache
        logits, cache = target.score(cache, tokens)
        return _pad(logits, block), None, cache

    varies = longest is not None
    widths = call_widths(_largest(draft, block.shape[1])) if varies else (block.shape[1],)
    if len(widths) == 1:
        return call(widths[0], cache, block)
    # A program for each width, of which one runs.
    smallest = jnp.searchsorted(jnp.asarray(widths), longest + 1)
    branches = [functools.partial(call, width) for width in widths]
    return lax.switch(smallest, branches, cache, block)


def _scores_parts(target: Target) -> bool:
    """Whether a target's call costs what the longest proposal needs, of whatever length."""
    return isinstance(target, PartialTarget) and target.scores_parts


def _largest(draft: Draft, block: int) -> int:
    """Positions of the largest block that the draft can need, of ``block`` at most."""
    return block if draft.max_proposal is None else min(draft.max_proposal + 1, block)


def call_widths(largest: int) -> tuple[int, ...]:
    """Numbers of positions that the target is compiled for where proposals vary.

    >>> call_widths(6)
    (1, 2, 4, 6)
    """
    widths = [1]
    while widths[-1] < largest:
        widths.append(min(2 * widths[-1], largest))
    return tuple(widths)


def _pad(values: Array, block: Array) -> Array:
    """Zeros for the positions of the block that were not computed."""
    missing = block.shape[1] - values.shape[1]
    return jnp.pad(values, ((0, 0), (0, missing), (0, 0)))


def _step_function(verifier: Verifier | TreeVerifier, gamma: int, **options) -> Callable:
    """``(target, draft, state, settings) -> (state, iteration)`` for a verifier."""
    if isinstance(verifier, TreeVerifier):
        return functools.partial(tree_lib.step, tree=verifier.tree(gamma), **options)
    return functools.partial(step, gamma=gamma, verifier=verifier, **options)


def _paced_step(
    target, draft, settings, pace: Pace, verifier, gamma: int, *, eos_id: int, **options
):
    """``(state, limit) -> (state, iteration)``, and whether proposals fall short of limits."""
    step_of = _step_function(verifier, gamma, eos_id=pace.eos_id(eos_id), **options)
    if isinstance(verifier, TreeVerifier):
        # All of the tree, or nothing.
        return lambda state, limit: step_of(target, draft, state, settings), False
    fill = pace.is_forced if draft.varies else None
    return (
        lambda state, limit: step_of(target, draft, state, settings, limit=limit, fill=fill),
        draft.varies,
    )


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
    verifier: Verifier | TreeVerifier = DEFAULT_VERIFIER,
    eos_id: int = EOS_ID,
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
      eos_id: the token that ends a row; in a prompt it does not.
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
    stream = _checked_stream(
        target, draft, prompts, rng, verifier, gamma, max_decode_len, num_decodes, pace
    )
    settings = settings.repeat(num_decodes)
    if verifier.coupled:
        settings = settings.keep_ties()
    rows = {"max_decode_len": max_decode_len, "num_decodes": num_decodes}
    rows["num_nodes"] = verifier.num_nodes(gamma)
    state = init(
        target,
        draft,
        inputs,
        prompts,
        stream,
        gamma=gamma,
        max_decode_steps=max_decode_steps,
        lazy=pace is not None,
        **rows,
    )
    options = {"eos_id": eos_id, "rescale_log_probs": rescale_log_probs}
    if pace is None:
        step = _step_function(verifier, gamma, **options)
        state = lax.while_loop(
            lambda state: ~done(state), lambda state: step(target, draft, state, settings)[0], state
        )
    else:
        step, varies = _paced_step(target, draft, settings, pace, verifier, gamma, **options)
        paced = paced_lib.decode(
            target,
            draft,
            paced_lib.start(state, pace),
            settings,
            step,
            lambda: prefill_draft(draft, inputs, prompts, **rows),
            varies=varies,
            coupled=verifier.coupled,
            **options,
        )
        state, pace = paced.state, paced.pace
    return outputs_lib.finish(state.outputs, num_decodes, max_decode_len, state.stats, pace)


# The stepper's programs, compiled once for each shape. The state is donated: its caches
# are updated in place.
_jit_init = jax.jit(
    init, static_argnames=("gamma", "max_decode_len", "num_decodes", "num_nodes", "lazy")
)


@functools.partial(
    jax.jit,
    static_argnames=("gamma", "verifier", "eos_id", "rescale_log_probs"),
    donate_argnames="state",
)
def _jit_step(target, draft, state, settings, *, verifier, gamma, **options):
    return _step_function(verifier, gamma, **options)(target, draft, state, settings)


_jit_limit = jax.jit(paced_lib.next_limit)


@functools.partial(
    jax.jit,
    static_argnames=("max_decode_len", "num_decodes", "num_nodes", "coupled"),
    donate_argnames="state",
)
def _jit_prepare(draft, inputs, prompts, state, settings, *, coupled, **rows):
    def prefill():
        return prefill_draft(draft, inputs, prompts, **rows)

    return paced_lib.prepare(draft, state, settings, prefill, coupled=coupled)


@functools.partial(
    jax.jit,
    static_argnames=("gamma", "verifier", "eos_id", "rescale_log_probs"),
    donate_argnames="state",
)
def _jit_paced_step(target, draft, state, settings, *, verifier, gamma, **options):
    step, varies = _paced_step(target, draft, settings, state.pace, verifier, gamma, **options)
    return paced_lib.speculative_step(draft, state, step, varies=varies)


_jit_plain_step = jax.jit(
    paced_lib.plain_step,
    static_argnames=("coupled", "eos_id", "rescale_log_probs"),
    donate_argnames="paced",
)


def speculative_steps(
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
    verifier: Verifier | TreeVerifier = DEFAULT_VERIFIER,
    eos_id: int = EOS_ID,
    rescale_log_probs: bool = True,
    pace: Pace | None = None,
) -> Iterator[Iteration]:
    """``speculative_decode``, driven from the host: yields after each iteration.

    For streaming and for traces. Same arguments, same text, same errors (at the call);
    slower by a round trip for each iteration. A plain step, at a pace, is an iteration
    without proposals. The generator's return value is the ``Decoded`` result.

    Raises:
      InputError: as of ``speculative_decode``, at the call; or a row's logits are not
        finite, before its tokens are yielded.
    """
    outputs_lib.check_whole(prompts)
    stream = _checked_stream(
        target, draft, prompts, rng, verifier, gamma, max_decode_len, num_decodes, pace
    )
    settings = settings.repeat(num_decodes)
    if verifier.coupled:
        settings = settings.keep_ties()
    rows = {"max_decode_len": max_decode_len, "num_decodes": num_decodes}
    rows["num_nodes"] = verifier.num_nodes(gamma)
    options = {"gamma": gamma, "eos_id": eos_id, "rescale_log_probs": rescale_log_probs}

    # Of its own: what stands in a generator waits for the first ``next``.
    def iterations(pace):
        state = _jit_init(
            target,
            draft,
            inputs,
            prompts,
            stream,
            gamma=gamma,
            max_decode_steps=max_decode_steps,
            lazy=pace is not None,
            **rows,
        )
        if pace is None:
            ended = np.asarray(state.outputs.ended)
            while not ended.all():
                state, iteration = _jit_step(
                    target, draft, state, settings, verifier=verifier, **options
                )
                iteration = _fetched(iteration, state)
                yield iteration
                ended = iteration.ended
        else:
            prepare = functools.partial(
                _jit_prepare, draft, inputs, prompts, coupled=verifier.coupled, **rows
            )
            paced = paced_lib.start(state, pace)
            paced = yield from _paced_steps(
                target, draft, paced, settings, prepare, verifier, **options
            )
            state, pace = paced.state, paced.pace.end_batch()
        return outputs_lib.finish(state.outputs, num_decodes, max_decode_len, state.stats, pace)

    return iterations(pace)


def _paced_steps(
    target, draft, paced: PacedState, settings, prepare, verifier, *, gamma: int, **options
) -> Iterator[Iteration]:
    """``paced_decoding.decode``, driven from the host."""
    ready, ended = False, np.asarray(paced.state.outputs.ended)
    while not ended.all():
        if not _jit_limit(draft, paced):
            ready = False
            paced, iteration = _jit_plain_step(
                target, draft, paced, settings, coupled=verifier.coupled, **options
            )
        elif not ready:
            paced, ready = prepare(paced, settings), True
            continue
        else:
            paced, iteration = _jit_paced_step(
                target, draft, paced, settings, verifier=verifier, gamma=gamma, **options
            )
        iteration = _fetched(iteration, paced.state)
        yield iteration
        ended = iteration.ended
    return paced


def _fetched(iteration: Iteration, state: DecodeState) -> Iteration:
    """The iteration on the host, all that is fetched for it.

    Raises:
      InputError: the target's logits were not finite.
    """
    iteration, scores = jax.device_get((iteration, state.outputs.scores))
    outputs_lib.check_sound(scores)
    return iteration


def _checked_stream(
    target, draft, prompts, rng, verifier, gamma, max_decode_len, num_decodes, pace
) -> Stream:
    check_arguments(target, draft, prompts, gamma, max_decode_len)
    if pace is not None and pace.largest != gamma:
        raise InputError(f"gamma is {gamma} and the pace has costs up to {pace.largest}: give that")
    stream = outputs_lib.row_stream(
        rng, prompts.shape[0], num_decodes, verifier.coupled, max_decode_len
    )
    if isinstance(verifier, TreeVerifier):
        tree_lib.check_tree(target, draft, stream)
    return stream


def check_arguments(target: Target, draft: Draft, prompts, gamma: int, max_decode_len: int):
    """Raises ``InputError`` for arguments that cannot be decoded with."""
    if gamma < 0:
        raise InputError(f"gamma is {gamma}: give at least 0 (0 is plain decoding)")
    missing = [name for name in vars(Draft) if name[0] != "_" and not hasattr(draft, name)]
    if missing:
        raise InputError(
            f"{type(draft).__name__} has no {', '.join(missing)}: derive it from "
            "interfaces.DraftBase, which has what a draft need not have of its own"
        )
    if draft.vocab_size != target.vocab_size:
        raise InputError(
            f"the draft has {draft.vocab_size} tokens and the target {target.vocab_size}: "
            "use a draft with the target's vocabulary"
        )
    if draft.uses_target_states and not isinstance(target, StatefulTarget):
        raise InputError(
            f"{type(draft).__name__} needs the target's states and {type(target).__name__} "
            "has no score_states: use another draft"
        )
    outputs_lib.check_prompts(prompts, max_decode_len)
    check_positions(target, max_decode_len)
    draft.check(target, max_decode_len)
