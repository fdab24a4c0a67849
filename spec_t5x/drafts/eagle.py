"""An EAGLE head as the draft: a decoder layer that continues from the target's states.

``models/eagle.py`` has the network. A separate model has to compute again what the target knows;
an EAGLE head starts from the target's states, and reads the source from the target's cache.
"""

import flax.struct
import jax.numpy as jnp

from spec_t5x.drafts.sequential import slices
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.interfaces import Cache, Context, DraftTraits, Outcome, Proposal
from spec_t5x.models.cache import KVCache
from spec_t5x.models.eagle import DraftingCache, EagleNetwork
from spec_t5x.types import Array, Int


@flax.struct.dataclass
class EagleDraft(SharedEncoderDraft):
    """``SharedEncoderDraft`` that is fed the target's states with the text.

    Keys and values of drafted tokens depend on the head's own states, and are dropped: before the
    next proposal, one call feeds the iteration's tokens again, with the target's states.
    """

    network = EagleNetwork

    @property
    def traits(self) -> DraftTraits:
        """Traits that request the target's last states, and those of the head's ``depths``."""
        return DraftTraits(uses_target_states=True, depths=self.model.config.depths)

    def propose(self, state: Cache, context: Context, gamma: int) -> tuple[Proposal, Cache]:
        proposal, cache = super().propose(state, context, gamma)
        return proposal, cache.at(jnp.minimum(cache.lengths, context.lengths + 1))

    def commit(self, state: Cache, outcome: Outcome) -> Cache:
        """Drops the drafted tokens; the next proposal feeds the accepted ones again."""
        return super().commit(state, outcome.replace(path=None))

    def _num_last(self, depth: int) -> int:
        return depth + 1

    def _score(self, context: Context):
        """Returns ``score(cache, tokens)``: the head's states after the tokens, and the cache."""

        def score(cache: KVCache, tokens: Int[Array, "batch new"]):
            states = slices(context.target_states, cache.lengths, tokens.shape[1])
            return self.model.apply(cache, tokens, states, method="follow")

        return score

    def _feed_last(self, cache: KVCache, context: Context, depth: int, num_nodes: int):
        num = self._num_last(depth)
        starts = jnp.maximum(context.lengths + 1 - num, 0)
        tokens = slices(context.sequences, starts, num)
        states, cache = self._score(context)(cache.at(starts), tokens)
        last = (context.lengths - starts)[:, None, None]
        states = jnp.take_along_axis(states, last, axis=1)
        cache = DraftingCache.after(cache.at(context.lengths + 1), states[:, 0], num_nodes)
        return self.model.logits(states)[:, 0], cache
