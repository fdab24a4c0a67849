"""Uniform random tokens: the floor of all drafts (section 3.6)."""

import flax.struct
import jax.numpy as jnp

from spec_t5x.interfaces import Context, DraftBase, DraftState, Proposal


@flax.struct.dataclass
class UniformDraft(DraftBase):
    """Proposes any token with the same probability, at no cost.

    Even this one is exact, and at a vocabulary of n tokens accepted about once in n.
    """

    vocab_size: int = flax.struct.field(pytree_node=False)

    def propose(
        self, state: DraftState, context: Context, gamma: int
    ) -> tuple[Proposal, DraftState]:
        """``gamma`` tokens, whatever the text and the target's settings."""
        batch = context.lengths.shape[0]
        if gamma == 0:
            return Proposal.nothing(batch, 0, self.vocab_size), state
        probs = jnp.full((batch, self.vocab_size), 1 / self.vocab_size, jnp.float32)
        # Argmax of equal probabilities would be token 0 for ever; at temperature 0 any
        # draft will do, so it goes on drawing.
        settings = context.settings.replace(greedy=False)
        tokens = [context.draws.sample(probs, offset, settings) for offset in range(gamma)]
        return Proposal.full(
            jnp.stack(tokens, axis=1), jnp.repeat(probs[:, None], gamma, axis=1)
        ), state
