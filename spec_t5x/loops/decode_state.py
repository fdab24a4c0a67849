"""The state of speculative decoding, which one iteration hands to the next."""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.errors import InputError
from spec_t5x.interfaces import Cache, Context, Draft, DraftState, Target, shown_to
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops.outputs import Outputs
from spec_t5x.loops.pace import Pace
from spec_t5x.sampling.distributions import Sampling, write_rows
from spec_t5x.sampling.draws import Stream, draft_draws
from spec_t5x.types import EOS_ID, Array, Bool, EndOfSequence, Float, Float32, Int, PyTree
from spec_t5x.verifiers import BlockVerifier, Verifier

DEFAULT_VERIFIER = BlockVerifier()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """The settings that a loop is compiled for, by their names in ``speculative_decode``."""

    # Tokens proposed in each iteration at most; with a tree, its depth; 0 is plain decoding.
    gamma: int
    # Room for tokens, the prompt's included.
    max_decode_len: int
    # Sequences for each input.
    num_decodes: int = 1
    # Decides which proposals to keep (``verifiers.verifier``).
    verifier: Verifier = DEFAULT_VERIFIER
    # The token that ends a row, or several of them; in a prompt they do not.
    eos_id: EndOfSequence = EOS_ID
    # Whether scores are under the sampled distribution (T5X's default: argmax scores 0) or under
    # the model's own.
    rescale_log_probs: bool = True

    @property
    def plain(self) -> "Loop":
        """The loop at gamma 0, whose steps call no draft."""
        return dataclasses.replace(self, gamma=0)

    @property
    def num_nodes(self) -> int:
        """Tokens of each row in one target call."""
        return self.verifier.num_nodes(self.gamma) if self.gamma else 1

    @property
    def max_length(self) -> int:
        """The caches' length: an ended row's last call may start at ``max_decode_len``."""
        return self.max_decode_len + self.num_nodes


@flax.struct.dataclass(kw_only=True)
class DecodeStats:
    """Counts for each row, over the iterations before it ended."""

    # Target calls: iterations, and plain steps where drafts did not pay.
    target_calls: Int[Array, "*rows"]
    # The plain steps among them; 0 without a pace.
    plain_steps: Int[Array, "*rows"]
    # Tokens that these calls appended, end of sequence included.
    appended: Int[Array, "*rows"]
    # Draft tokens proposed: gamma in each iteration, or fewer.
    proposed: Int[Array, "*rows"]
    # Draft tokens that are part of the output, in all and by position in the block.
    accepted: Int[Array, "*rows"]
    accepted_by_position: Int[Array, "*rows gamma"]
    # Iterations in which the draft at the position was verified, all before it accepted: not
    # where fewer were proposed, nor beyond the end of the row. The divisor of acceptance rates
    # (``theory.formulas.conditional_acceptance``).
    verified_by_position: Int[Array, "*rows gamma"]
    # Sum over the verified positions of beta, the chance that the draft is accepted
    # (``Verifier.chances``).
    beta_sum: Float32[Array, "*rows"]

    @property
    def iterations(self) -> Array:
        """Target calls over a draft's proposals."""
        return self.target_calls - self.plain_steps

    @property
    def verified(self) -> Array:
        """Verified positions of all iterations."""
        return self.verified_by_position.sum(axis=-1)

    @property
    def block_efficiency(self) -> Array:
        """Generated tokens for each target call, counted; 0 of a row without a call.

        It is ``1 + accepted / target_calls`` only if every call appends a token of the target. The
        last call often does not: a row of 11 tokens, 9 of them accepted drafts in 3 calls, the
        end of sequence among them, has 11 / 3.
        """
        return self.appended / self.target_calls.clip(min=1)

    @property
    def alpha(self) -> Array:
        """Mean of beta over verified positions: the low-variance estimate of alpha.

        It averages the probability of accepting in place of the count of acceptances
        (Corollary 3.6). NaN where nothing was verified.
        """
        return self.beta_sum / self.verified

    @classmethod
    def zeros(cls, batch: int, gamma: int) -> "DecodeStats":
        """Returns the counts before the first iteration."""
        shapes = {"accepted_by_position": (batch, gamma), "verified_by_position": (batch, gamma)}
        counts = {
            field.name: jnp.zeros(shapes.get(field.name, batch), jnp.int32)
            for field in dataclasses.fields(cls)
        }
        return cls(**counts | {"beta_sum": jnp.zeros(batch, jnp.float32)})

    def add(
        self, found: "Verified", iteration: "Iteration", live: Bool[Array, "batch"], is_plain: bool
    ) -> "DecodeStats":
        """Adds an iteration, or a plain step; tokens after a row's end do not count."""
        num_accepted, num_appended = iteration.num_accepted, iteration.num_appended
        # Where a draft entered the output or was replaced.
        num_verified = jnp.minimum(found.num_drafts, num_appended)
        positions = jnp.arange(self.accepted_by_position.shape[1])[None, :]
        accepted_here, verified = (positions < n[:, None] for n in (num_accepted, num_verified))
        # A plain step has no drafts at any position.
        beta = jnp.where(verified[:, : found.beta.shape[1]], found.beta, 0.0)
        return self.replace(
            target_calls=self.target_calls + live,
            plain_steps=self.plain_steps + (live & is_plain),
            appended=self.appended + num_appended,
            proposed=self.proposed + found.num_proposed * live,
            accepted=self.accepted + num_accepted,
            accepted_by_position=self.accepted_by_position + accepted_here,
            verified_by_position=self.verified_by_position + verified,
            beta_sum=self.beta_sum + jnp.sum(beta, axis=1),
        )


@flax.struct.dataclass(kw_only=True)
class DecodeState:
    """The state between two iterations."""

    # Sequences, lengths, limits, ended rows and scores.
    outputs: Outputs
    # The target's cache: every token of a row but its last one.
    target_cache: Cache
    draft_state: DraftState
    # The source of the rows' random numbers.
    stream: Stream
    # The target's decoder states, for drafts that use them (see ``Context``).
    target_states: Float32[Array, "batch positions embed"] | None
    stats: DecodeStats
    # Decides how many tokens to draft next; None for gamma in every iteration.
    pace: Pace | None = None


@flax.struct.dataclass(kw_only=True)
class Iteration:
    """The record of one iteration, a line of Figure 1; a plain step has no drafts."""

    # The draft's proposal, and the number of its tokens that count. Of a tree, the drafts that
    # were accepted and the first of those refused after them.
    proposed: Int[Array, "batch drafts"]
    num_proposed: Int[Array, "batch"]
    # Number of leading proposals that entered the output; the next one was rejected, unless the
    # row ended before it or all were accepted.
    num_accepted: Int[Array, "batch"]
    # Tokens appended, and the number of them that count: the accepted proposals, then (unless the
    # row ended before it) the target's own token.
    appended: Int[Array, "batch drafts+1"]
    num_appended: Int[Array, "batch"]
    ended: Array


@flax.struct.dataclass(kw_only=True)
class Verified:
    """The result of one target call over a proposal; for a tree, along the accepted path.

    There are gamma drafts, or none in a plain step.
    """

    # As of ``Iteration``.
    drafts: Int[Array, "batch drafts"]
    num_drafts: Int[Array, "batch"]
    # Tokens proposed, all of a tree's.
    num_proposed: Int[Array, "batch"]
    # ``num_accepted`` and ``next_token``; of a tree, the ``path``.
    verdict: PyTree
    # The target's, at each draft and after the last one.
    logits: Float32[Array, "batch drafts+1 vocab"]
    probs: Float32[Array, "batch drafts+1 vocab"]
    states: Float[Array, "batch drafts+1 embed"]
    # Chance that each draft is accepted where those before it are.
    beta: Float32[Array, "batch drafts"]
    # Before the rollback, and before the draft's commit.
    target_cache: Cache
    draft_state: DraftState

    @property
    def emitted(self) -> Int[Array, "batch block"]:
        """The accepted drafts, then the verifier's token (repeated to fill the block)."""
        padded = jnp.pad(self.drafts, ((0, 0), (0, 1)))
        is_draft = jnp.arange(padded.shape[1])[None, :] < self.verdict.num_accepted[:, None]
        return jnp.where(is_draft, padded, self.verdict.next_token[:, None])


@flax.struct.dataclass
class NoDraft(Draft):
    """The draft of plain decoding, which is never called."""

    vocab_size: int = flax.struct.field(pytree_node=False)

    def propose(self, state, context, gamma):
        """Raises ``InputError``: plain decoding is gamma 0."""
        raise InputError(f"gamma is {gamma} and there is no draft: give one, or gamma 0")


def init(
    target: Target,
    draft: Draft,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    stream: Stream,
    loop: Loop,
    *,
    max_decode_steps: Int[Array, "*steps"] | None = None,
    pace: Pace | None = None,
    paced: bool = False,
    room: int | None = None,
) -> DecodeState:
    """Encodes the inputs, feeds the prompts, and repeats each row ``num_decodes`` times.

    At gamma 0 the draft's state is empty; with a pace, given or to come (``paced``), it is zeros
    until ``prefill_draft``. The caches have room for ``room`` tokens or, if it is None, for all
    that the loop may write.
    """
    outputs = outputs_lib.start(prompts, loop.max_decode_len, max_decode_steps, room=loop.gamma + 1)
    room = room or loop.max_length
    target_cache = prefill(target, inputs, prompts, outputs.lengths, room)
    target_states = None
    if loop.gamma and draft.traits.uses_target_states:
        target_states = _first_states(shown_to(draft, target), target_cache, prompts, room)
    outputs, target_cache, target_states = outputs_lib.repeat_rows(
        (outputs, target_cache, target_states), loop.num_decodes
    )
    draft_state = prefill_draft(draft, inputs, prompts, loop, room) if loop.gamma else ()
    if paced or pace is not None:
        # XLA drops the draft's prefill.
        draft_state = jax.tree.map(jnp.zeros_like, draft_state)
    return DecodeState(
        outputs=outputs,
        target_cache=target_cache,
        draft_state=draft_state,
        stream=stream,
        target_states=target_states,
        stats=DecodeStats.zeros(outputs.lengths.shape[0], loop.gamma),
        # A copy: the stepper donates its state, and this pace is the caller's.
        pace=pace and jax.tree.map(jnp.copy, pace.new_batch()),
    )


def prefill(
    target: Target,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    lengths: Int[Array, "batch"],
    max_length: int,
) -> Cache:
    """Returns the target's cache with every prompt token in it but each row's last one."""
    forced = prompts if prompts.shape[1] > 1 else None
    return target.rollback(target.prefill(inputs, max_length, forced), lengths)


def prefill_draft(
    draft: Draft,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    loop: Loop,
    room: int | None = None,
) -> DraftState:
    """Returns the draft's first state, for ``num_decodes`` rows of each input."""
    state = draft.prefill(inputs, prompts, room or loop.max_length)
    return outputs_lib.repeat_rows(state, loop.num_decodes)


def if_wanted(
    wanted: Bool[Array, ""], function: Callable[[PyTree], PyTree], kept: PyTree
) -> PyTree:
    """Returns ``function(kept)`` if it is ``wanted``, else ``kept``.

    The program is a loop of at most one round, since a conditional would copy its results.
    """
    _, made = lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (jnp.zeros_like(carry[0]), function(carry[1])),
        (wanted, kept),
    )
    return made


def done(state: DecodeState) -> Array:
    """Tells whether every row has ended."""
    return jnp.all(state.outputs.ended)


def make_context(
    state: DecodeState, settings: Sampling, coupled: bool, limit: Int[Array, ""] | None = None
) -> Context:
    """Returns the draft's context in the coming iteration."""
    outputs = state.outputs
    return Context(
        sequences=outputs.sequences,
        lengths=outputs.lengths,
        live=~outputs.ended,
        draws=draft_draws(state.stream, outputs.lengths, coupled),
        settings=settings,
        target_cache=state.target_cache,
        target_states=state.target_states,
        limit=limit,
        starts=outputs.starts,
        limits=outputs.limits,
    )


def with_states(
    kept: Float32[Array, "batch positions embed"] | None,
    states: Float[Array, "batch new embed"],
    starts: Int[Array, "batch"],
) -> Float32[Array, "batch positions embed"] | None:
    """Returns a text's states with those of new tokens; None where no draft uses states."""
    return None if kept is None else write_rows(kept, states.astype(kept.dtype), starts + 1)


def _first_states(
    target: Target, cache: Cache, prompts: Int[Array, "batch width"], room: int
) -> Float32[Array, "batch room embed"]:
    """Computes the prompts' ``Context.target_states``, with zeros up to position ``room``."""
    batch, width = prompts.shape
    states = jnp.zeros((batch, 1 + room, target.state_size), jnp.float32)
    if width == 1:
        return states
    starts = jnp.zeros(batch, jnp.int32)
    _, of_prompts, _ = target.score(target.rollback(cache, starts), prompts[:, :-1])
    return with_states(states, of_prompts, starts)
