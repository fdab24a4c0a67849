"""Mixed: copy where there is a match, and ask another draft where there is none."""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.interfaces import (
    Context,
    Draft,
    DraftBase,
    DraftState,
    Outcome,
    Proposal,
    Target,
    check_vocabularies,
)
from spec_t5x.types import Array, Bool, Int, PyTree


@flax.struct.dataclass
class MixedState:
    """The states of both drafts."""

    first: DraftState
    second: DraftState
    # Rows that the first draft proposed for in this iteration, and their lengths then.
    took_first: Bool[Array, "batch"]
    lengths: Int[Array, "batch"]


@flax.struct.dataclass
class MixedDraft(DraftBase):
    """Two drafts: ``first`` wherever it proposes anything, else ``second``; by row.

    When ``first`` proposes for every live row, ``second`` is not run at all; it catches up
    with what was copied when it is asked again.
    """

    first: CopyDraft
    second: Draft

    @property
    def vocab_size(self) -> int:
        """Of either draft."""
        return self.second.vocab_size

    @property
    def varies(self) -> bool:
        """As the first one does."""
        return self.first.varies or self.second.varies

    @property
    def uses_target_states(self) -> bool:
        """Where either does."""
        return self.first.uses_target_states or self.second.uses_target_states

    @property
    def keeps_text(self) -> bool:
        """Where either does."""
        return self.first.keeps_text or self.second.keeps_text

    def check(self, target: Target, max_decode_len: int) -> None:
        """As of either."""
        check_vocabularies(self.first, self.second, "first draft", "second draft")
        self.first.check(target, max_decode_len)
        self.second.check(target, max_decode_len)

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int
    ) -> MixedState:
        """The states of both."""
        batch = prompts.shape[0]
        return MixedState(
            first=self.first.prefill(inputs, prompts, max_length),
            second=self.second.prefill(inputs, prompts, max_length),
            took_first=jnp.zeros(batch, bool),
            lengths=jnp.zeros(batch, jnp.int32),
        )

    def propose(
        self, state: MixedState, context: Context, gamma: int
    ) -> tuple[Proposal, MixedState]:
        """The first draft's proposal, or the second's where that is empty."""
        first, first_state = self.first.propose(state.first, context, gamma)
        first = first.checked(self.first.max_proposal)
        took_first = first.num_proposed > 0
        # A row that copies does not keep the second draft busy.
        rest = context.replace(live=context.live & ~took_first)

        def ask(second_state):
            second_state = self.second.catch_up(second_state, rest, gamma + 1)
            second, second_state = self.second.propose(second_state, rest, gamma)
            second = second.checked(self.second.max_proposal)
            drafted = (second.tokens, second.probs, second.num_proposed)
            cache = context.target_cache if second.target_cache is None else second.target_cache
            return drafted, cache, second_state

        nothing = jax.eval_shape(lambda second_state: ask(second_state)[0], state.second)

        def skip(second_state):
            drafted = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nothing)
            return drafted, context.target_cache, second_state

        (tokens, probs, counts), target_cache, second_state = lax.cond(
            jnp.any(rest.live), ask, skip, state.second
        )
        if first.probs is not None or probs is not None:
            second = Proposal(tokens, probs)
            probs = jnp.where(
                took_first[:, None, None],
                first.distributions(self.vocab_size),
                second.distributions(self.vocab_size),
            )
        proposal = Proposal(
            tokens=jnp.where(took_first[:, None], first.tokens, tokens),
            probs=probs,
            # Each was looked at above.
            drawn=gamma,
            counts=jnp.where(took_first, first.num_proposed, counts),
            target_cache=target_cache,
        )
        return proposal, MixedState(first_state, second_state, took_first, context.lengths)

    def commit(self, state: MixedState, outcome: Outcome) -> MixedState:
        """Tells each draft what became of its own proposal."""
        # What the second draft proposed beside a copy was not even looked at: to it the
        # row has stopped where it was, and runs ahead later.
        for_second = Outcome(
            lengths=jnp.where(state.took_first, state.lengths, outcome.lengths),
            num_accepted=jnp.where(state.took_first, 0, outcome.num_accepted),
        )
        return state.replace(
            first=self.first.commit(state.first, outcome),
            second=self.second.commit(state.second, for_second),
        )

    def catch_up(self, state: MixedState, context: Context, width: int) -> MixedState:
        """Brings both up to the text."""
        return state.replace(
            first=self.first.catch_up(state.first, context, width),
            second=self.second.catch_up(state.second, context, width),
        )
