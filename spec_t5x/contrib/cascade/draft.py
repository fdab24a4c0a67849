"""Hierarchy: a draft that is itself sped up by a cheaper one (section 6).

The middle model decodes speculatively, verifying the proposals of the cheap draft, until it has
gamma tokens. These follow its distribution exactly, and are its proposal to the target. Cascades
nest: the cheap draft may be a cascade.
"""

import flax.struct
import jax.numpy as jnp
from jax import lax

from spec_t5x.checkpoints.make_draft import model_draft
from spec_t5x.drafts.kinds import DraftKind, DraftOptions, Request
from spec_t5x.drafts.sequential import catch_up, slices
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import (
    Cache,
    Context,
    Draft,
    DraftState,
    Outcome,
    Proposal,
    Target,
    check_positions,
    check_vocabularies,
)
from spec_t5x.loops import decode_state
from spec_t5x.loops.outputs import prompt_lengths
from spec_t5x.loops.speculative import verify
from spec_t5x.models.weights import BITS
from spec_t5x.sampling.distributions import Sampling, write_rows
from spec_t5x.sampling.draws import draft_draws
from spec_t5x.types import Array, Bool, Float32, Int, PyTree
from spec_t5x.verifiers import BlockVerifier, CoupledVerifier


@flax.struct.dataclass
class CascadeState:
    """States of the middle model and of the cheap draft."""

    # Holds at most the tokens of a row's text.
    cache: Cache
    draft_state: DraftState


@flax.struct.dataclass(kw_only=True)
class _Inner:
    """State of the middle model's speculative decoding."""

    sequences: Int[Array, "batch width"]
    lengths: Int[Array, "batch"]
    # The middle model's distribution of each token that it has written; None at temperature 0.
    probs: Float32[Array, "batch room vocab"] | None
    state: CascadeState


@flax.struct.dataclass
class CascadeDraft(Draft):
    """A cascade: ``model`` drafts for the target, and ``draft`` for ``model``."""

    model: Target
    draft: Draft
    # Tokens that the cheap draft proposes to the middle model in each of its calls.
    inner_gamma: int = flax.struct.field(pytree_node=False, default=2)
    # Settings that the middle model samples with; None takes the target's.
    settings: Sampling | None = None

    @property
    def vocab_size(self) -> int:
        """Number of logits of the middle model."""
        return self.model.vocab_size

    @property
    def _spare(self) -> int:
        """Room for the inner loop, which overshoots by a block and writes one in idle rows."""
        return 2 * (self.inner_gamma + 1)

    def check(self, target: Target, max_decode_len: int) -> None:
        """Raises ``InputError`` for an ``inner_gamma`` below 1 or parts that cannot draft."""
        if self.inner_gamma < 1:
            raise InputError(f"inner_gamma is {self.inner_gamma}: give at least 1")
        check_vocabularies(self.draft, self.model, "inner draft", "draft")
        if self.draft.traits.uses_target_states:
            raise InputError(
                f"{type(self.draft).__name__} looks at the target's states: it cannot draft "
                "inside a cascade"
            )
        check_positions(self.model, max_decode_len, "draft")
        self.draft.check(self.model, max_decode_len)

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int
    ) -> CascadeState:
        """Encodes the inputs and feeds the prompts to both."""
        lengths, room = prompt_lengths(prompts), max_length + self._spare
        return CascadeState(
            cache=decode_state.prefill(self.model, inputs, prompts, lengths, room),
            draft_state=self.draft.prefill(inputs, prompts, room),
        )

    def propose(
        self, state: CascadeState, context: Context, gamma: int
    ) -> tuple[Proposal, CascadeState]:
        """Proposes up to ``gamma`` tokens from the middle model's distribution."""
        num, lengths = context.num_drafts(gamma), context.lengths
        room = (lengths.shape[0], gamma + self._spare, self.vocab_size)
        greedy = (self.settings or context.settings).greedy
        cache = catch_up(self.model, state.cache, context, lengths, gamma + 1)
        inner = _Inner(
            sequences=jnp.pad(context.sequences, ((0, 0), (0, self._spare))),
            lengths=lengths,
            probs=None if greedy else jnp.zeros(room, jnp.float32),
            state=state.replace(cache=self.model.rollback(cache, lengths)),
        )

        def wants_more(inner):
            return context.live & (inner.lengths < lengths + num)

        inner = lax.while_loop(
            lambda inner: jnp.any(wants_more(inner)),
            lambda inner: self._iterate(inner, context, wants_more(inner)),
            inner,
        )
        # Other rows keep the tokens that their caches hold.
        kept = jnp.where(context.live, inner.lengths, cache.lengths)
        probs = None if inner.probs is None else inner.probs[:, :gamma]
        # The verifier has drawn for every position.
        proposal = Proposal(slices(inner.sequences, lengths + 1, gamma), probs, drawn=num)
        cache = self.model.rollback(inner.state.cache, kept)
        return proposal, inner.state.replace(cache=cache)

    def commit(self, state: CascadeState, outcome: Outcome) -> CascadeState:
        """Rolls both back to the tokens that the target kept."""
        lengths = jnp.minimum(state.cache.lengths, outcome.lengths)
        return CascadeState(
            cache=self.model.rollback(state.cache, lengths),
            draft_state=self.draft.commit(state.draft_state, outcome),
        )

    def catch_up(self, state: CascadeState, context: Context, width: int) -> CascadeState:
        """Feeds the missing tokens to the middle model and to the cheap draft."""
        return CascadeState(
            cache=catch_up(self.model, state.cache, context, context.lengths, width),
            draft_state=self.draft.catch_up(state.draft_state, context, width),
        )

    def _iterate(self, inner: _Inner, context: Context, live: Bool[Array, "batch"]) -> _Inner:
        """Runs an iteration of Algorithm 1, between the middle model and the cheap draft."""
        stream, coupled = context.draws.stream, context.draws.coupled
        inner_context = context.replace(
            sequences=inner.sequences,
            lengths=inner.lengths,
            live=live,
            draws=draft_draws(stream, inner.lengths, coupled),
            settings=self.settings or context.settings,
            target_cache=inner.state.cache,
            target_states=None,
            limit=None,
        )
        gamma, verifier = self.inner_gamma, CoupledVerifier() if coupled else BlockVerifier()
        draft_state = self.draft.catch_up(inner.state.draft_state, inner_context, gamma + 1)
        found = verify(self.model, self.draft, draft_state, inner_context, stream, gamma, verifier)
        accepted = jnp.where(live, found.verdict.num_accepted, 0)
        lengths = inner.lengths + jnp.where(live, accepted + 1, 0)
        outcome = Outcome(lengths=lengths, num_accepted=accepted)
        tokens, probs = found.emitted, inner.probs
        if probs is not None:
            probs = write_rows(probs, found.probs, inner.lengths - context.lengths)
        return _Inner(
            sequences=write_rows(inner.sequences, tokens, inner.lengths + 1),
            lengths=lengths,
            probs=probs,
            state=CascadeState(
                cache=self.model.rollback(found.target_cache, lengths),
                draft_state=self.draft.commit(found.draft_state, outcome),
            ),
        )


def _make(request: Request, argument: str) -> CascadeDraft:
    directory, _, inner = argument.partition(",")
    if directory in BITS:
        middle = request.model.rounded(BITS[directory])
    else:
        middle = model_draft(request, directory).model
    options = DraftOptions(dtype=request.options.dtype, weights=request.options.weights)
    cheapest = request.make(inner or "bigram", options)
    if isinstance(cheapest, SharedEncoderDraft):
        raise InputError(
            f"draft {inner} shares the encoder of its target, and in a cascade it would draft "
            f"for {directory or 'another model'}: give a draft that shares nothing"
        )
    return CascadeDraft(middle, cheapest, settings=request.options.settings)


def _middle(argument: str) -> list[str]:
    directory = argument.partition(",")[0]
    return [directory] if directory and directory not in BITS else []


KIND = DraftKind(
    make=_make,
    checkpoints=_middle,
    drafts=lambda argument: [inner for inner in argument.split(",", 1)[1:] if inner],
)
