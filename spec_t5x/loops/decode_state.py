"""State of the decoding loop: its settings, its first state, and the results of an iteration."""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.errors import InputError, check_numbers
from spec_t5x.interfaces import Cache, Context, Draft, DraftState, Target, shown_to
from spec_t5x.loops import outputs as outputs_lib
from spec_t5x.loops.outputs import Outputs
from spec_t5x.loops.pace import Pace
from spec_t5x.names import AUTO
from spec_t5x.sampling.distributions import Sampling, write_rows
from spec_t5x.sampling.draws import Stream, draft_draws
from spec_t5x.sampling.verification import Verdict
from spec_t5x.types import EOS_ID, Array, Bool, EndOfSequence, Float, Float32, Int, PyTree
from spec_t5x.verifiers import BlockVerifier, CoupledVerifier, Verifier

DEFAULT_VERIFIER = BlockVerifier()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """Static settings of a decoding loop: the ``options`` of ``speculative_decode``."""

    # The most tokens that a row proposes in an iteration; a tree's depth; 0 is plain decoding.
    gamma: int
    # The most tokens of an output, the prompt's included, the start token not.
    max_decode_len: int
    # Number of outputs of each input; each is a row of the batch.
    num_decodes: int = 1
    # Decides how many proposed tokens are accepted (``verifiers.verifier`` makes it by name).
    verifier: Verifier = DEFAULT_VERIFIER
    # Id of the token that ends a row, or several ids; in a prompt these tokens end nothing.
    eos_id: EndOfSequence = EOS_ID
    # Whether scores are log-probabilities under the sampled distribution (T5X's default: argmax
    # scores 0) or, if False, under the softmax of the model's logits.
    rescale_log_probs: bool = True

    def __post_init__(self):
        if self.gamma == AUTO:
            raise InputError(f"gamma is {AUTO}: give a number, and a loops.pace.Pace as pace")
        check_numbers(0, gamma=self.gamma, max_decode_len=self.max_decode_len)
        check_numbers(1, num_decodes=self.num_decodes)
        if not isinstance(self.verifier, Verifier):
            raise InputError(f"verifier is {self.verifier!r}: give an object of spec_t5x.verifiers")
        # A compiled loop is looked up by its verifier's fields.
        cls, known = type(self.verifier), {f.name for f in dataclasses.fields(self.verifier)}
        # A class has its fields' defaults and cached properties.
        if hidden := [n for n in vars(self.verifier) if not (n in known or hasattr(cls, n))]:
            raise InputError(f"{cls.__name__}.{hidden[0]} is no field: make it one of a dataclass")

    @property
    def plain(self) -> "Loop":
        """Loop at gamma 0: an iteration is one target call, without a draft or a verdict."""
        # All verifiers that are not coupled draw alike, and share a program.
        verifier = CoupledVerifier() if self.verifier.coupled else DEFAULT_VERIFIER
        return dataclasses.replace(self, gamma=0, verifier=verifier)

    @property
    def num_nodes(self) -> int:
        """Tokens of each row in one target call: 1 + gamma, or a tree's nodes."""
        return self.verifier.num_nodes(self.gamma) if self.gamma else 1

    @property
    def max_length(self) -> int:
        """Positions of a row in the caches: calls on an ended row may start at max_decode_len."""
        return self.max_decode_len + self.num_nodes


@flax.struct.dataclass(kw_only=True)
class DecodeStats:
    """Counts for each row, over the iterations before the row ended."""

    # Target calls: iterations, and plain steps in which the pace used no draft.
    target_calls: Int[Array, "*rows"]
    # The calls that a pace made plain steps; 0 without a pace, also at gamma 0.
    plain_steps: Int[Array, "*rows"]
    # Tokens that these calls appended, end of sequence included.
    appended: Int[Array, "*rows"]
    # Draft tokens proposed, at most gamma in an iteration; of a tree, all nodes but the root.
    proposed: Int[Array, "*rows"]
    # Draft tokens that entered the output, in total and by position in their proposal.
    accepted: Int[Array, "*rows"]
    accepted_by_position: Int[Array, "*rows gamma"]
    # Iterations in which the draft at the position was accepted or rejected: a draft was proposed
    # there, all before it were accepted, and the row had not ended. Acceptance rates are shares of
    # these (``labs.theory.formulas``).
    verified_by_position: Int[Array, "*rows gamma"]
    # Sum over the verified positions of beta, the probability that the draft is accepted
    # (``Verifier.chances``).
    beta_sum: Float32[Array, "*rows"]

    @property
    def verified(self) -> Array:
        """Draft tokens that were accepted or rejected, over all iterations."""
        return self.verified_by_position.sum(axis=-1)

    @property
    def block_efficiency(self) -> Array:
        """Mean number of tokens that a target call appended; 0 for a row without a call.

        The mean is ``1 + accepted / target_calls`` only if every call appends a token of the
        target. The last call often does not: a row of 11 tokens in 3 calls, of which 9 are
        accepted drafts and the last one of these is the end of sequence, has 11 / 3.
        """
        return self.appended / self.target_calls.clip(min=1)

    @classmethod
    def zeros(cls, batch: int, gamma: int) -> "DecodeStats":
        """Returns the counts of ``batch`` rows before the first iteration, all 0."""
        shapes = {"accepted_by_position": (batch, gamma), "verified_by_position": (batch, gamma)}
        counts = {
            field.name: jnp.zeros(shapes.get(field.name, batch), jnp.int32)
            for field in dataclasses.fields(cls)
        }
        return cls(**counts | {"beta_sum": jnp.zeros(batch, jnp.float32)})

    def add(
        self, found: "Verified", iteration: "Iteration", live: Bool[Array, "batch"], is_plain: bool
    ) -> "DecodeStats":
        """Returns the counts after an iteration (``is_plain``: a plain step) of ``live`` rows."""
        num_accepted, num_appended = iteration.num_accepted, iteration.num_appended
        # A verified draft entered the output, or the target's token took its place.
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
    """State between two iterations: the carry of the compiled loop."""

    # Sequences, lengths, limits, ended rows and scores.
    outputs: Outputs
    # The target's cache, which holds all tokens of a row but its last one.
    target_cache: Cache
    draft_state: DraftState
    # The source of the rows' random numbers.
    stream: Stream
    # The target's decoder states, for drafts that use them (see ``Context``).
    target_states: Float32[Array, "batch positions embed"] | None
    stats: DecodeStats
    # Chooses how many tokens to draft next; if it is None, every iteration drafts gamma.
    pace: Pace | None = None


@flax.struct.dataclass(kw_only=True)
class Iteration:
    """Record of one iteration, a line of the paper's Figure 1; a plain step has 0 ``drafts``."""

    # The proposed tokens, and how many of each row's are valid. For a tree: the accepted drafts,
    # then the first of the drafts that were rejected after them.
    proposed: Int[Array, "batch drafts"]
    num_proposed: Int[Array, "batch"]
    # Number of leading proposed tokens that entered the output; the next one was rejected, unless
    # the row ended before it or all were accepted.
    num_accepted: Int[Array, "batch"]
    # Appended tokens, and how many of each row's are valid: the accepted drafts, then (unless the
    # row ended before it) the target's own token. ``ended`` is the mask of ended rows.
    appended: Int[Array, "batch drafts+1"]
    num_appended: Int[Array, "batch"]
    ended: Array


@flax.struct.dataclass(kw_only=True)
class Verified:
    """Result of one target call over a proposal; for a tree, along the accepted path.

    The axis ``drafts`` has gamma entries, or none in a plain step.
    """

    # ``Iteration.proposed`` and ``Iteration.num_proposed``.
    drafts: Int[Array, "batch drafts"]
    num_drafts: Int[Array, "batch"]
    # Number of proposed tokens; for a tree, of all its nodes but the root.
    num_proposed: Int[Array, "batch"]
    verdict: Verdict
    # The target's logits, distributions and states at each draft and after the last one.
    logits: Float32[Array, "batch drafts+1 vocab"]
    probs: Float32[Array, "batch drafts+1 vocab"]
    states: Float[Array, "batch drafts+1 embed"]
    # Probability that each draft is accepted, given that those before it are.
    beta: Float32[Array, "batch drafts"]
    # The cache before the target's rollback, and the state before the draft's commit.
    target_cache: Cache
    draft_state: DraftState

    @property
    def emitted(self) -> Int[Array, "batch block"]:
        """Accepted drafts of each row, then the verifier's token, repeated to fill the block."""
        padded = jnp.pad(self.drafts, ((0, 0), (0, 1)))
        is_draft = jnp.arange(padded.shape[1])[None, :] < self.verdict.num_accepted[:, None]
        return jnp.where(is_draft, padded, self.verdict.next_token[:, None])


@flax.struct.dataclass
class NoDraft(Draft):
    """Draft of plain decoding, which the loop never calls."""

    vocab_size: int = flax.struct.field(pytree_node=False)

    def propose(self, state, context, gamma):
        """Raises ``InputError``, because plain decoding (gamma 0) calls no draft."""
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
    """Returns the first state: inputs encoded, prompts fed, rows repeated ``num_decodes`` times.

    The draft's state is ``()`` at gamma 0. With a ``pace``, or one to be added later (``paced``),
    that state is zeros until ``speculative.prepare`` makes it. Caches have ``room`` positions, or
    ``loop.max_length`` if ``room`` is None.
    """
    outputs = outputs_lib.start(prompts, loop.max_decode_len, max_decode_steps, room=loop.gamma + 1)
    room = room or loop.max_length
    target_cache = prefill(target, inputs, prompts, room)
    target_states = None
    if loop.gamma and draft.traits.uses_target_states:
        target_states = _first_states(shown_to(draft, target), target_cache, prompts, room)
    of_inputs = outputs, target_cache, target_states
    outputs, target_cache, target_states = outputs_lib.repeat_rows(of_inputs, loop.num_decodes)
    draft_state = prefill_draft(draft, inputs, prompts, loop, room) if loop.gamma else ()
    if paced or pace is not None:
        # Zeros in place of the state, so that XLA drops the draft's prefill.
        draft_state = jax.tree.map(jnp.zeros_like, draft_state)
    return DecodeState(
        outputs=outputs,
        target_cache=target_cache,
        draft_state=draft_state,
        stream=stream,
        target_states=target_states,
        stats=DecodeStats.zeros(outputs.lengths.shape[0], loop.gamma),
        pace=pace and pace.new_batch(),
    )


def prefill(
    target: Target, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int
) -> Cache:
    """Returns a model's cache with all tokens of each prompt but the last one."""
    forced = prompts if prompts.shape[1] > 1 else None
    cache = target.prefill(inputs, max_length, forced)
    return target.rollback(cache, outputs_lib.prompt_lengths(prompts))


def prefill_draft(
    draft: Draft,
    inputs: PyTree,
    prompts: Int[Array, "batch width"],
    loop: Loop,
    room: int | None = None,
) -> DraftState:
    """Returns the draft's first state: ``num_decodes`` rows of each input, ``room`` positions."""
    state = draft.prefill(inputs, prompts, room or loop.max_length)
    return outputs_lib.repeat_rows(state, loop.num_decodes)


def if_wanted(
    wanted: Bool[Array, ""], function: Callable[[PyTree], PyTree], kept: PyTree
) -> PyTree:
    """Returns ``function(kept)`` if ``wanted`` is True, else ``kept``.

    Runs as a ``while_loop`` of at most one round, because XLA copies the results of a ``cond``.
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
    """Returns the ``Context`` of the draft's next proposal, of at most ``limit`` tokens a row."""
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
    """Stores states in ``kept``, if not None, at the positions they predict, ``starts + 1``, …"""
    return None if kept is None else write_rows(kept, states.astype(kept.dtype), starts + 1)


def _first_states(
    target: Target, cache: Cache, prompts: Int[Array, "batch width"], room: int
) -> Float32[Array, "batch positions embed"]:
    """Computes ``Context.target_states`` of the prompts: ``1 + room`` positions, zeros beyond."""
    batch, width = prompts.shape
    states = jnp.zeros((batch, 1 + room, target.state_size), jnp.float32)
    if width == 1:
        return states
    starts = jnp.zeros(batch, jnp.int32)
    _, of_prompts, _ = target.score(target.rollback(cache, starts), prompts[:, :-1])
    return with_states(states, of_prompts, starts)
