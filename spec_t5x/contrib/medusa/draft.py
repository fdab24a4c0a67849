"""Draft by Medusa heads (arXiv 2401.10774): all tokens from one state of the target.

The proposal is a chain of tokens, not a tree; see ``network`` for the heads.
"""

import flax.struct
import jax.numpy as jnp

from spec_t5x.contrib.medusa.checkpoints import FORMAT, load_heads, open_heads
from spec_t5x.contrib.medusa.network import T5Heads
from spec_t5x.drafts.kinds import DraftKind, Request
from spec_t5x.drafts.sequential import draw_token
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, Draft, DraftTraits, Proposal, Target
from spec_t5x.loops.outputs import prompt_lengths
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.types import Array, Int, PyTree


@flax.struct.dataclass
class MedusaDraft(Draft):
    """Draft whose heads predict 1, 2, … tokens ahead in one call.

    Heads do not see each other's proposals, so later tokens are less likely to be accepted. A head
    proposes at most one token, and none in the first iteration, as the target has no state yet. The
    draft's state is the length of each row's prompt, by which ``propose`` detects that iteration.
    """

    heads: T5Heads
    # Sampling settings of the draft; None for the target's.
    settings: Sampling | None = None

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary, counted in logits."""
        return self.heads.module.config.vocab_size

    @property
    def traits(self) -> DraftTraits:
        """Traits: reads the target's states, and proposes at most one token per head."""
        num = self.heads.num_heads
        return DraftTraits(varies=True, max_worthwhile=num, uses_target_states=True)

    def check(self, target: Target, max_decode_len: int) -> None:
        """Raises ``InputError`` if the target's states are not of the heads' width and class."""
        theirs, width = type(target).__name__, self.heads.network.config.emb_dim
        if not isinstance(target, T5Model) or target.config.emb_dim != width:
            raise InputError(
                f"the heads are for a T5Model of width {width} and the target is a {theirs} with "
                f"states of {target.state_size}: use heads that were trained for this target"
            )

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int
    ) -> Int[Array, "batch"]:
        """Returns the prompts' lengths, which are the draft's state."""
        return prompt_lengths(prompts)

    def propose(
        self, state: Int[Array, "batch"], context: Context, gamma: int
    ) -> tuple[Proposal, Int[Array, "batch"]]:
        """Proposes one token of each of the first ``min(gamma, num_heads)`` heads."""
        num, settings = min(gamma, self.heads.num_heads), self.settings or context.settings
        # The last layer's features come first; other drafts may have requested more layers.
        at_last = context.lengths[:, None, None]
        states = jnp.take_along_axis(context.target_states, at_last, axis=1)[:, 0]
        states = states[:, : self.heads.module.config.emb_dim]
        logits, draws = self.heads.head_logits(states, context.last_tokens, num), context.draws
        tokens, probs = jnp.zeros(logits.shape[:2], jnp.int32), []
        for head in range(num):
            ruled = context.ruled(logits[:, head, None], tokens, head)[:, 0]
            token, of_head, draws = draw_token(ruled, draws, settings)
            tokens = tokens.at[:, head].set(token)
            probs.append(of_head)
        probs = None if settings.greedy else jnp.stack(probs, axis=1)
        counts = jnp.where(context.lengths > state, num, 0)
        return Proposal(tokens, probs, draws.drawn, counts), state


def _make(request: Request, argument: str) -> MedusaDraft:
    params = load_heads(argument, request.target)
    return MedusaDraft(T5Heads.create(params, request.model), request.options.settings)


KIND = DraftKind(
    make=_make,
    draft=MedusaDraft,
    open=open_heads,
    format=FORMAT,
    has_checkpoint=True,
    packaged="medusa",
    needs_encoder=True,
    has_temperature=True,
)
