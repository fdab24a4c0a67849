"""An EAGLE head as the draft: a decoder layer that goes on from the target's states.

See ``models/eagle.py`` for the network. A separate model has to work out what the target knows
already; this one starts from it, and reads the source where the target did.
"""

import flax.struct
import jax.numpy as jnp

from spec_t5x.drafts.sequential import slices
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.drafts.transformer import TransformerState
from spec_t5x.interfaces import Context, DraftTraits, Outcome, Proposal
from spec_t5x.models.cache import DecoderCache
from spec_t5x.models.eagle import DraftingCache, EagleNetwork
from spec_t5x.types import Array, Int


@flax.struct.dataclass
class EagleDraft(SharedEncoderDraft):
    """A ``SharedEncoderDraft`` that is fed the target's states with the text.

    What it cached of its own drafts was made from its own states, so it does not stay: the
    tokens of the last iteration are all fed again, in one call, before the next proposal.
    """

    network = EagleNetwork

    @property
    def traits(self) -> DraftTraits:
        """It is fed the target's last states, and those of the layers that it was trained with."""
        depths = self.model.config.depths
        return DraftTraits(uses_target_states=True, depths=depths)

    def propose(
        self, state: TransformerState, context: Context, gamma: int
    ) -> tuple[Proposal, TransformerState]:
        """Up to ``gamma`` tokens, each sampled given the ones before it."""
        proposal, state = super().propose(state, context, gamma)
        read = jnp.minimum(state.cache.lengths, context.lengths + 1)
        return proposal, state.replace(cache=state.cache.at(read))

    def commit_tree(
        self, state: TransformerState, outcome: Outcome, path: Int[Array, "batch depth"]
    ) -> TransformerState:
        """Keeps nothing of the tree."""
        return self.commit(state, outcome)

    def _num_last(self, depth: int) -> int:
        return depth + 1

    def _score(self, context: Context):
        """Feeds the text with the target's states; gives states where a model gives logits."""

        def score(cache: DecoderCache, tokens: Int[Array, "batch new"]):
            states = slices(context.target_states, cache.lengths, tokens.shape[1])
            return self.model.apply(cache, tokens, states, method="follow")

        return score

    def _feed_last(self, cache: DecoderCache, context: Context, depth: int, num_nodes: int):
        num = self._num_last(depth)
        starts = jnp.maximum(context.lengths + 1 - num, 0)
        tokens = slices(context.sequences, starts, num)
        states, cache = self._score(context)(cache.at(starts), tokens)
        last = (context.lengths - starts)[:, None, None]
        states = jnp.take_along_axis(states, last, axis=1)
        cache = DraftingCache.after(cache.at(context.lengths + 1), states[:, 0], num_nodes)
        return self.model.logits(states)[:, 0], cache
