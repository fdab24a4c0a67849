"""Heads on the target's last state as the draft: gamma tokens from one call.

Medusa (arXiv 2401.10774) with a chain of tokens; see ``network``.
"""

import flax.struct
import jax.numpy as jnp

from spec_t5x.contrib.medusa.checkpoints import FORMAT, load_heads
from spec_t5x.contrib.medusa.network import T5Heads
from spec_t5x.drafts.kinds import DraftKind, Request, one_checkpoint
from spec_t5x.drafts.sequential import draw_token
from spec_t5x.interfaces import Context, Draft, DraftTraits, Proposal
from spec_t5x.loops.outputs import prompt_lengths
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.types import Array, Int, PyTree


@flax.struct.dataclass
class MedusaDraft(Draft):
    """Proposes with heads that predict 1, 2, … tokens ahead, all at once.

    A head does not know the proposals of the heads before it: a call is cheap, and each further
    token less likely to be right. At most one token for each head is proposed, and none in the
    first iteration: the target has no state yet. The draft's state is each row's length then.
    """

    heads: T5Heads
    # Settings that this draft samples with; None takes the target's.
    settings: Sampling | None = None

    @property
    def vocab_size(self) -> int:
        """Number of logits, the target's."""
        return self.heads.module.config.vocab_size

    @property
    def traits(self) -> DraftTraits:
        """Traits of a draft with one token for each head, from the target's states."""
        num = self.heads.num_heads
        return DraftTraits(varies=True, max_worthwhile=num, uses_target_states=True)

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int
    ) -> Int[Array, "batch"]:
        """Returns the prompts' lengths."""
        return prompt_lengths(prompts)

    def propose(
        self, state: Int[Array, "batch"], context: Context, gamma: int
    ) -> tuple[Proposal, Int[Array, "batch"]]:
        """Proposes a token of each of the first ``gamma`` heads, as far as there are heads."""
        num, settings = min(gamma, self.heads.num_heads), self.settings or context.settings
        # Another draft may have requested states of more layers, which follow the last layer's.
        at_last = context.lengths[:, None, None]
        states = jnp.take_along_axis(context.target_states, at_last, axis=1)[:, 0]
        states = states[:, : self.heads.module.config.emb_dim]
        logits, draws = self.heads.head_logits(states, context.last_tokens, num), context.draws
        tokens, probs = jnp.zeros((len(logits), gamma), jnp.int32), []
        for head in range(num):
            ruled = context.ruled(logits[:, head, None], tokens, head)[:, 0]
            token, of_head, draws = draw_token(ruled, draws, settings)
            tokens = tokens.at[:, head].set(token)
            probs.append(of_head)
        if settings.greedy:
            probs = None
        else:
            probs = jnp.pad(jnp.stack(probs, axis=1), ((0, 0), (0, gamma - num), (0, 0)))
        counts = jnp.where(context.lengths > state, num, 0)
        return Proposal(tokens, probs, draws.drawn, counts), state


def _make(request: Request, argument: str) -> MedusaDraft:
    params = load_heads(argument or request.packaged("medusa"), request.target)
    return MedusaDraft(T5Heads.create(params, request.model), request.options.settings)


KIND = DraftKind(make=_make, format=FORMAT, checkpoints=one_checkpoint, needs_encoder=True)
