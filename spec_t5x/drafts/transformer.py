"""A smaller model as the draft: the approximation model M_q of the paper."""

from collections.abc import Callable

import flax.struct
import jax.numpy as jnp

from spec_t5x import interfaces
from spec_t5x.drafts.sequential import catch_up, draft_tokens, draft_tree, slices
from spec_t5x.interfaces import Cache, Context, Draft, Outcome, Proposal, Target, TreeProposal
from spec_t5x.loops import decode_state
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Int, PyTree


@flax.struct.dataclass
class TransformerDraft(Draft):
    """Draft that decodes plainly with a separate model, whose cache is the draft's state.

    The cache may lack the last-but-one token of the text: drafting feeds all proposed tokens but
    the last, which enters the text if all are accepted. Each proposal therefore starts by feeding
    *two* tokens from the first that is missing, which costs less than a separate call. Plain steps
    and other drafts extend the text by more tokens that the cache lacks, which ``catch_up`` feeds.
    """

    model: Target
    # Settings that this draft samples with; None takes the target's. Any choice keeps the
    # target's distribution, and changes only how much is accepted (section 6).
    settings: Sampling | None = None

    @property
    def vocab_size(self) -> int:
        """Number of logits of the model."""
        return self.model.vocab_size

    def check(self, target: Target, max_decode_len: int) -> None:
        """Raises ``InputError`` if the model has fewer than ``max_decode_len`` positions."""
        interfaces.check_positions(self.model, max_decode_len, "draft")

    def prefill(self, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int) -> Cache:
        """Returns the model's cache with the sources encoded and the prompts fed."""
        return decode_state.prefill(self.model, inputs, prompts, max_length)

    def propose(self, state: Cache, context: Context, gamma: int) -> tuple[Proposal, Cache]:
        """Proposes up to ``gamma`` tokens, each sampled given those before it (Algorithm 1)."""
        logits, cache = self._feed_last(state, context, gamma, gamma)
        given = logits, context, self.settings, gamma
        proposal, cache = draft_tokens(self.model.score, cache, *given)
        # Rows that are not live (ended, or another draft's) may lack tokens of their texts.
        lengths = jnp.where(context.live, cache.lengths, state.lengths)
        return proposal, self.model.rollback(cache, lengths)

    def propose_tree(
        self, state: Cache, context: Context, tree: Tree
    ) -> tuple[TreeProposal, Cache]:
        """Proposes a token for each node but the root; siblings are drawn without replacement."""
        logits, cache = self._feed_last(state, context, tree.depth, tree.num_nodes)
        return draft_tree(self.model, cache, logits, context, self.settings, tree)

    def commit(self, state: Cache, outcome: Outcome) -> Cache:
        """Rolls back the rejected tokens; the last accepted one may be missing in the cache.

        In a tree, moves the accepted nodes' cache entries behind the text first.
        """
        lengths = state.lengths
        if outcome.path is not None:
            # The cache's length includes the root. The last level was not fed to the model.
            fed = outcome.path[:, :-1]
            state = self.model.move(state, lengths[:, None] - 1 + fed, lengths)
            lengths = lengths + fed.shape[1]
        return self.model.rollback(state, jnp.minimum(lengths, outcome.lengths))

    def catch_up(self, state: Cache, context: Context, width: int) -> Cache:
        """Feeds the tokens that the cache lacks, but for the last ones, which ``propose`` feeds."""
        wanted = jnp.maximum(context.lengths + 1 - self._num_last(width - 1), 0)
        return catch_up(self.model, state, context, wanted, width, self._score(context))

    def _num_last(self, depth: int) -> int:
        """Returns how many of a text's last tokens are fed before ``depth`` levels are drafted."""
        return 2

    def _score(self, context: Context) -> Callable[[Cache, Array], tuple]:
        """Returns ``score(cache, tokens)``, which feeds tokens and returns the cache last."""
        return self.model.score

    def _feed_last(self, cache: Cache, context: Context, depth: int, num_nodes: int):
        """Feeds the last tokens, two or one; returns logits ``[batch, vocab]`` after them, cache.

        Subclasses use ``depth`` and ``num_nodes`` of the chain or tree that is drafted next.
        """
        # A prefix LM's cached prompt, whose tokens attended to later ones, is not fed again.
        starts = jnp.clip(cache.lengths, jnp.maximum(context.lengths - 1, 0), context.lengths)
        pairs = slices(context.sequences, starts, 2)
        logits, _, cache = self.model.score(self.model.rollback(cache, starts), pairs)
        # A last token alone is fed with padding after it, which the next call overwrites.
        last = (context.lengths - starts)[:, None, None]
        logits = jnp.take_along_axis(logits, last, axis=1)[:, 0]
        return logits, self.model.rollback(cache, context.lengths + 1)
