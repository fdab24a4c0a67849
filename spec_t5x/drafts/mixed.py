"""Mixed: copy where there is a match, and ask another draft where there is none."""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.drafts.copying import CopyDraft
from spec_t5x.interfaces import Context, Draft, DraftBase, DraftState, Outcome, Proposal
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

    When ``first`` proposes for every live row, ``second`` is not run at all. It must
    bear with a text that runs ahead of it (``TransformerDraft(may_trail=True)``).
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
        took_first = first.counts > 0
        # A row that copies does not keep the second draft busy.
        rest = context.replace(live=context.live & ~took_first)

        def ask(second_state):
            return self.second.propose(second_state, rest, gamma)

        def skip(second_state):
            return first.replace(counts=jnp.zeros_like(first.counts)), second_state

        second, second_state = lax.cond(jnp.any(rest.live), ask, skip, state.second)

        def choose(ours, theirs):
            rows = took_first.reshape(-1, *[1] * (ours.ndim - 1))
            return jnp.where(rows, ours, theirs)

        proposal = jax.tree.map(choose, first, second)
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
