"""Cascade: a draft model that itself decodes speculatively (section 6 of the paper).

The middle model decodes gamma tokens speculatively by verifying proposals of the cheap draft. These
tokens follow the middle model's distribution exactly, and are the cascade's proposal to the target.
Cascades nest: the cheap draft may be a cascade.
"""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jax import lax

from spec_t5x import registry
from spec_t5x.checkpoints.make_draft import TRANSFORMER, kind_of
from spec_t5x.drafts.kinds import DraftKind, Request
from spec_t5x.drafts.self_draft import SelfDraft
from spec_t5x.drafts.sequential import catch_up, slices
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.errors import InputError, check_numbers
from spec_t5x.interfaces import (
    Cache,
    Context,
    Draft,
    DraftState,
    DraftTraits,
    Outcome,
    Proposal,
    Target,
    check_fits,
    check_positions,
)
from spec_t5x.loops import decode_state
from spec_t5x.loops.speculative import verify
from spec_t5x.models.weights import BITS
from spec_t5x.sampling.distributions import Sampling, write_rows
from spec_t5x.sampling.draws import draft_draws
from spec_t5x.types import Array, Bool, Float32, Int, PyTree
from spec_t5x.verifiers import BlockVerifier, CoupledVerifier

# The inner draft, if none is named.
_INNER = "bigram"


@flax.struct.dataclass
class CascadeState:
    """States of the middle model and of the cheap draft."""

    # The middle model's; between calls of ``propose`` it holds no token beyond a row's text.
    cache: Cache
    draft_state: DraftState


@flax.struct.dataclass(kw_only=True)
class _Inner:
    """Loop state while the middle model decodes one proposal."""

    sequences: Int[Array, "batch width"]
    lengths: Int[Array, "batch"]
    # The middle model's distribution of each new token; None if it decodes greedily.
    probs: Float32[Array, "batch room vocab"] | None
    state: CascadeState


@flax.struct.dataclass
class CascadeDraft(Draft):
    """Draft in which ``model`` proposes to the target, and ``draft`` to ``model``."""

    model: Target
    draft: Draft
    # Number of tokens that the cheap draft proposes for each call of the middle model.
    inner_gamma: int = flax.struct.field(pytree_node=False, default=2)
    # Sampling settings of the middle model; None for the target's.
    settings: Sampling | None = None

    @property
    def vocab_size(self) -> int:
        """Number of logits of the middle model."""
        return self.model.vocab_size

    @property
    def _spare(self) -> int:
        """Number of extra positions: a row may overshoot by a block, and idle rows write one."""
        return 2 * (self.inner_gamma + 1)

    def check(self, target: Target, max_decode_len: int) -> None:
        """Raises ``InputError`` if ``inner_gamma`` is below 1 or either part cannot draft here."""
        check_numbers(1, inner_gamma=self.inner_gamma)
        check_positions(self.model, max_decode_len, "draft")
        if getattr(self.draft, "traits", DraftTraits()).uses_target_states:
            raise InputError(
                f"{type(self.draft).__name__} reads the target's states, so it cannot draft inside "
                "a cascade: give another inner draft"
            )
        check_fits(self.draft, self.model, max_decode_len)

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int
    ) -> CascadeState:
        """Prefills the middle model's cache and the cheap draft's state."""
        room = max_length + self._spare
        return CascadeState(
            cache=decode_state.prefill(self.model, inputs, prompts, room),
            draft_state=self.draft.prefill(inputs, prompts, room),
        )

    def propose(
        self, state: CascadeState, context: Context, gamma: int
    ) -> tuple[Proposal, CascadeState]:
        """Proposes ``gamma`` tokens, at most ``context.limit``, that the middle model decodes."""
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
        # Rows that have ended keep the length of their cache.
        kept = jnp.where(context.live, inner.lengths, cache.lengths)
        probs = None if inner.probs is None else inner.probs[:, :gamma]
        # The inner verifier has used the random draws of these positions.
        proposal = Proposal(slices(inner.sequences, lengths + 1, gamma), probs, drawn=num)
        cache = self.model.rollback(inner.state.cache, kept)
        return proposal, inner.state.replace(cache=cache)

    def commit(self, state: CascadeState, outcome: Outcome) -> CascadeState:
        """Rolls middle model and cheap draft back to the tokens that the target accepted."""
        lengths = jnp.minimum(state.cache.lengths, outcome.lengths)
        return CascadeState(
            cache=self.model.rollback(state.cache, lengths),
            draft_state=self.draft.commit(state.draft_state, outcome),
        )

    def catch_up(self, state: CascadeState, context: Context, width: int) -> CascadeState:
        """Feeds both models the text's tokens that they lack, ``width`` tokens at a time."""
        return CascadeState(
            cache=catch_up(self.model, state.cache, context, context.lengths, width),
            draft_state=self.draft.catch_up(state.draft_state, context, width),
        )

    def _iterate(self, inner: _Inner, context: Context, live: Bool[Array, "batch"]) -> _Inner:
        """Runs Algorithm 1 once: the middle model verifies a block of the cheap draft."""
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
    name, inner = _drafts(argument)
    if name in BITS:
        middle = request.model.rounded(BITS[name])
    else:
        middle = request.make(name, request.options).model
    cheapest = request.make(inner, dataclasses.replace(request.options, settings=None))
    return CascadeDraft(middle, cheapest, settings=request.options.settings)


def _check(text: str, argument: str) -> None:
    """Raises ``InputError`` if the inner draft of ``text`` reads the target's cache."""
    name, inner = _drafts(argument)
    drafting = inner
    while kind_of(drafting) == "mixed":
        drafting = drafting.partition(":")[2] or TRANSFORMER
    draft = getattr(registry.find("draft", kind_of(drafting)), "draft", None) or Draft
    own_cache = issubclass(draft, SelfDraft) and name not in BITS
    if own_cache or issubclass(draft, SharedEncoderDraft):
        raise InputError(
            f"draft {inner} reads the target's cache, but in a cascade it would draft for "
            f"{name}: give another inner draft, such as copy"
        )


def _drafts(argument: str) -> tuple[str, str]:
    """Returns the drafts that the middle and the cheapest model are."""
    directory, _, inner = argument.partition(",")
    named = f"{TRANSFORMER}:{directory}" if directory else TRANSFORMER
    return directory if directory in BITS else named, inner or _INNER


KIND = DraftKind(make=_make, draft=CascadeDraft, check=_check, drafts=_drafts, has_temperature=True)
