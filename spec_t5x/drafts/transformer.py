"""A smaller model as the draft: the approximation model M_q of the paper."""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x import autoregressive
from spec_t5x.distributions import Sampling, sample_rows, standardize
from spec_t5x.interfaces import Cache, Proposal, Target
from spec_t5x.types import PAD_ID, Array, Int, Key, PyTree


@flax.struct.dataclass
class TransformerDraft:
    """Proposes by plain decoding with a model of its own.

    The model's cache trails the committed text by at most one token: proposing
    feeds all but the last proposal, which is committed when all are accepted. Each
    proposal therefore starts with the last *two* tokens. The first of them is
    usually cached already and overwritten with the same values; when all were
    accepted it is the one that was missing. One call with two tokens costs less
    than a call of its own for the missing one.
    """

    model: Target
    # How this draft samples; None takes the target's settings. Any choice keeps the
    # target's distribution, and changes only how much is accepted (section 6).
    settings: Sampling | None = None

    @property
    def vocab_size(self) -> int:
        """Number of logits of the model."""
        return self.model.vocab_size

    def prefill(self, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int) -> Cache:
        """Encodes the inputs and feeds the prompts to the draft's own model."""
        lengths = jnp.sum(prompts[:, 1:] != PAD_ID, axis=1, dtype=jnp.int32)
        return autoregressive.prefill(self.model, inputs, prompts, lengths, max_length)

    def propose(
        self,
        state: Cache,
        sequences: Int[Array, "batch width"],
        lengths: Int[Array, "batch"],
        keys: Key[Array, "batch"],
        gamma: int,
        settings: Sampling,
    ) -> tuple[Proposal, Cache]:
        """``gamma`` tokens, each sampled given the ones before it (Algorithm 1)."""
        if gamma == 0:
            return _nothing(lengths.shape[0], self.vocab_size), state
        settings = settings if self.settings is None else self.settings

        def draw(logits, position):
            probs = standardize(logits, settings)
            position_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, position)
            return sample_rows(position_keys, probs, settings), probs

        def propose_one(carry, position):
            cache, token = carry
            logits, cache = self.model.score(cache, token[:, None])
            token, probs = draw(logits[:, 0], position)
            return (cache, token), (token, probs)

        logits, cache = self._catch_up(state, sequences, lengths)
        token, probs = draw(logits, 0)
        (cache, _), (tokens, all_probs) = lax.scan(
            propose_one, (cache, token), jnp.arange(1, gamma)
        )
        return Proposal(
            tokens=jnp.concatenate([token[None], tokens]).T,
            probs=jnp.concatenate([probs[None], all_probs]).swapaxes(0, 1),
        ), cache

    def commit(self, state: Cache, lengths: Int[Array, "batch"]) -> Cache:
        """Rolls back what was rejected; the cache may be one short of ``lengths``."""
        return self.model.rollback(state, lengths)

    def _catch_up(self, cache, sequences, lengths):
        """Feeds the last two tokens; logits after the last one ``[batch, vocab]``."""
        starts = jnp.maximum(lengths - 1, 0)
        pairs = jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), (2,)))(
            sequences, starts
        )
        logits, cache = self.model.score(self.model.rollback(cache, starts), pairs)
        # A row that holds nothing but its start token has it first in the pair; the
        # padding after it is overwritten by the next call.
        last = (lengths - starts)[:, None, None]
        logits = jnp.take_along_axis(logits, last, axis=1)[:, 0]
        return logits, self.model.rollback(cache, lengths + 1)


def _nothing(batch: int, vocab_size: int) -> Proposal:
    return Proposal(
        tokens=jnp.zeros((batch, 0), jnp.int32),
        probs=jnp.zeros((batch, 0, vocab_size), jnp.float32),
    )
