"""A smaller model as the draft: the approximation model M_q of the paper."""

from collections.abc import Callable

import flax.struct
import jax.numpy as jnp

from spec_t5x.drafts.sequential import (
    catch_up,
    draft_tokens,
    draft_tree,
    slices,
)
from spec_t5x.interfaces import (
    Cache,
    Context,
    Draft,
    Outcome,
    Proposal,
    Target,
    TreeProposal,
    check_positions,
)
from spec_t5x.loops import decode_state
from spec_t5x.loops.outputs import prompt_lengths
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.sampling.tree_shapes import Tree
from spec_t5x.types import Array, Int, PyTree


@flax.struct.dataclass
class TransformerState:
    """What a ``TransformerDraft`` keeps."""

    # Holds a row's text up to its length at most; ``TransformerDraft`` says when less.
    cache: Cache


@flax.struct.dataclass
class TransformerDraft(Draft):
    """Proposes by plain decoding with a model of its own.

    The model's cache trails the committed text by at most one token: proposing
    feeds all but the last proposal, which is committed when all are accepted. Each
    proposal therefore starts with the last *two* tokens. The first of them is
    usually cached already and overwritten with the same values; when all were
    accepted it is the one that was missing. One call with two tokens costs less
    than a call of its own for the missing one. Where others write too, the text runs
    ahead by more: ``catch_up`` feeds that.
    """

    model: Target
    # How this draft samples; None takes the target's settings. Any choice keeps the
    # target's distribution, and changes only how much is accepted (section 6).
    settings: Sampling | None = None

    @property
    def vocab_size(self) -> int:
        """Number of logits of the model."""
        return self.model.vocab_size

    def check(self, target: Target, max_decode_len: int) -> None:
        """Its own model needs positions, too."""
        check_positions(self.model, max_decode_len, "draft")

    def prefill(
        self, inputs: PyTree, prompts: Int[Array, "batch width"], max_length: int
    ) -> TransformerState:
        """Encodes the inputs and feeds the prompts to the draft's own model."""
        lengths = prompt_lengths(prompts)
        cache = decode_state.prefill(self.model, inputs, prompts, lengths, max_length)
        return TransformerState(cache)

    def propose(
        self, state: TransformerState, context: Context, gamma: int
    ) -> tuple[Proposal, TransformerState]:
        """Up to ``gamma`` tokens, each sampled given the ones before it (Algorithm 1)."""
        settings = context.settings if self.settings is None else self.settings
        logits, cache = self._feed_last(state.cache, context, gamma, gamma)
        proposal, cache = draft_tokens(self.model, cache, logits, context, settings, gamma)
        # What a row lacks that was not asked for, it still lacks.
        lengths = jnp.where(context.live, cache.lengths, state.cache.lengths)
        return proposal, TransformerState(self.model.rollback(cache, lengths))

    def propose_tree(
        self, state: TransformerState, context: Context, tree: Tree
    ) -> tuple[TreeProposal, TransformerState]:
        """A token for each node, drawn without replacement given the path to it."""
        settings = context.settings if self.settings is None else self.settings
        logits, cache = self._feed_last(state.cache, context, tree.depth, tree.num_nodes)
        proposal, cache = draft_tree(self.model, cache, logits, context, settings, tree)
        return proposal, state.replace(cache=cache)

    def commit_tree(
        self, state: TransformerState, outcome: Outcome, path: Int[Array, "batch depth"]
    ) -> TransformerState:
        """Keeps what was accepted and rolls back the rest."""
        # The cache's length is where the root is, and one further.
        roots = state.cache.lengths - 1
        # The last level was proposed and not fed.
        fed = path[:, :-1]
        cache = self.model.move(state.cache, roots[:, None] + fed, roots + 1)
        lengths = jnp.minimum(roots + 1 + fed.shape[1], outcome.lengths)
        return state.replace(cache=self.model.rollback(cache, lengths))

    def commit(self, state: TransformerState, outcome: Outcome) -> TransformerState:
        """Rolls back what was rejected; the cache may be one short of the text."""
        lengths = jnp.minimum(state.cache.lengths, outcome.lengths)
        return TransformerState(self.model.rollback(state.cache, lengths))

    def catch_up(self, state: TransformerState, context: Context, width: int) -> TransformerState:
        """Feeds what is missing before the tokens that ``propose`` feeds."""
        wanted = jnp.maximum(context.lengths + 1 - self._num_last(width - 1), 0)
        rows = context.sequences, wanted, context.live
        cache = catch_up(self.model, state.cache, *rows, width, self._score(context))
        return TransformerState(cache)

    def _num_last(self, depth: int) -> int:
        """How many tokens are fed before ``depth`` levels are drafted."""
        return 2

    def _score(self, context: Context) -> Callable[[Cache, Array], tuple]:
        """What feeds the text."""
        return self.model.score

    def _feed_last(self, cache, context: Context, depth: int, num_nodes: int):
        """Feeds the last two tokens; logits after the last one ``[batch, vocab]``.

        Before drafting ``num_nodes`` tokens, ``depth`` of which follow one another.
        """
        lengths = context.lengths
        starts = jnp.maximum(lengths - 1, 0)
        pairs = slices(context.sequences, starts, 2)
        logits, _, cache = self.model.score(self.model.rollback(cache, starts), pairs)
        # A row that holds nothing but its start token has it first in the pair; the
        # padding after it is overwritten by the next call.
        last = (lengths - starts)[:, None, None]
        logits = jnp.take_along_axis(logits, last, axis=1)[:, 0]
        return logits, self.model.rollback(cache, lengths + 1)
