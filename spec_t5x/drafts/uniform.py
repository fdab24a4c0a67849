"""Uniform random tokens as the draft: a reference for other drafts (section 3.6)."""

import flax.struct
import jax.numpy as jnp

from spec_t5x.drafts.kinds import DraftKind, Request, no_argument
from spec_t5x.interfaces import Context, Draft, DraftState, Proposal


@flax.struct.dataclass
class UniformDraft(Draft):
    """Draft that gives all n tokens the same probability; at temperature 0 one in n is accepted."""

    vocab_size: int = flax.struct.field(pytree_node=False)

    def propose(
        self, state: DraftState, context: Context, gamma: int
    ) -> tuple[Proposal, DraftState]:
        """Proposes ``gamma`` tokens that depend on neither text nor settings."""
        shape = (context.lengths.shape[0], gamma, self.vocab_size)
        probs = jnp.full(shape, 1 / self.vocab_size, jnp.float32)
        # Draws at temperature 0, too, because the argmax would always be token 0.
        settings = context.settings.replace(greedy=False)
        tokens, draws = [], context.draws
        for _ in range(gamma):
            token, draws = draws.next(probs[:, 0], settings)
            tokens.append(token)
        return Proposal(jnp.stack(tokens, axis=1), probs, draws.drawn), state


def _make(request: Request, argument: str) -> UniformDraft:
    return UniformDraft(request.model.vocab_size)


KIND = DraftKind(make=_make, draft=UniformDraft, check=no_argument, needs_network=False)
