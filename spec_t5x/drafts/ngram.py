"""N-grams: the next token from the last few, by a table counted from text (section 3.6).

The paper's Table 3 has unigrams and bigrams, which cost next to nothing; this draft has any order.
The commonest tokens after a context h are stored with their probability masses; the remaining
mass is distributed as after the context that is one token shorter, down to the unigrams:

    q(w | h) = mass_h(w) + (1 - sum mass_h) q(w | h without its first token)

Contexts that are not in the table have a distribution, too: that of the shorter context.
``labs/training/ngram_counts.py`` makes the masses by absolute discounting (Ney et al. 1994).
"""

import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.drafts.sequential import draft_tokens
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, Draft, DraftState, Proposal
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.types import Array, Float32, Int, Integer

# Masses are integers in units of 1 / MASS_UNITS, rounded down: they take two bytes, their sums are
# exact in float32, and some mass is always left for the shorter context.
MASS_UNITS = 1 << 16
# Fills a window before the start token; no stored context contains it.
_NO_TOKEN = -1
# Index of a context that is not stored.
_NOT_STORED = -1


@flax.struct.dataclass(kw_only=True)
class ContextLevel:
    """Stored contexts of one length, and the tokens that followed them.

    The levels are a trie that reads the text backwards: a context of this level is a shorter
    context of the level above, and the token before it. The level above the first has the empty
    context alone. Contexts are ordered by the shorter context, then by the token before it.
    """

    # The contexts that extend context i of the level above: first[i] … first[i + 1] - 1.
    first: Int[Array, "above_and_one"]
    # The token that each context has in front of the shorter one.
    tokens: Integer[Array, "contexts"]
    # The successors of context i: starts[i] … starts[i + 1] - 1.
    starts: Int[Array, "contexts+1"]
    # Tokens that followed a context, the likeliest first.
    successors: Integer[Array, "entries"]
    # Masses of the successors in units of 1 / MASS_UNITS; each context's sum is less than 1.
    masses: Integer[Array, "entries"]

    def find(self, shorter: Int[Array, ""], token: Int[Array, ""]) -> Int[Array, ""]:
        """Returns the index of the context ``token`` + ``shorter``, -1 if it is not stored.

        ``shorter`` is the index of a context in the level above, or -1 if that is not stored.
        """
        low, end = self.first[shorter], self.first[shorter + 1]
        high = end
        # A fixed number of steps, enough for the whole level, compiles to straight-line code.
        for _ in range(self.tokens.shape[0].bit_length()):
            middle = (low + high) // 2
            is_before = (low < high) & (self.tokens[middle] < token)
            low, high = jnp.where(is_before, middle + 1, low), jnp.where(is_before, high, middle)
        found = (shorter >= 0) & (low < end) & (self.tokens[low] == token)
        return jnp.where(found, low, _NOT_STORED)

    def followed_by(
        self, context: Int[Array, ""], num: int
    ) -> tuple[Integer[Array, "num"], Float32[Array, "num"]]:
        """Returns the first ``num`` tokens that followed a context, and their masses.

        Masses are 0 beyond the last successor, and for a context that is not stored (-1).
        """
        indices = self.starts[context] + jnp.arange(num)
        is_there = (context >= 0) & (indices < self.starts[context + 1])
        masses = jnp.where(is_there, self.masses[indices], 0).astype(jnp.float32)
        return self.successors[indices], masses / MASS_UNITS


@flax.struct.dataclass(kw_only=True)
class NgramDraft(Draft):
    """N-gram draft: the next token's distribution depends on the last ``order - 1`` tokens.

    Near the start of a text, contexts begin with the start token and are shorter.
    ``checkpoints.native.ngram_tables.load_ngram`` reads a draft from disk.
    """

    # Probability of each token without any context.
    unigram: Float32[Array, "vocab"]
    # Contexts of one token, of two, …; none for a unigram draft.
    levels: tuple[ContextLevel, ...] = ()
    # Settings that this draft samples with; None takes the target's.
    settings: Sampling | None = None
    # Largest number of successors of a stored context.
    max_successors: int = flax.struct.field(pytree_node=False, default=0)

    @property
    def vocab_size(self) -> int:
        """Number of unigrams, padding of the vocabulary included."""
        return self.unigram.shape[0]

    @property
    def order(self) -> int:
        """Order of the n-grams: 1 for unigrams, 2 for bigrams, …"""
        return 1 + len(self.levels)

    def with_order(self, order: int) -> "NgramDraft":
        """Returns the draft cut to ``order``; raises ``InputError`` outside 1 … ``self.order``."""
        if not 1 <= order <= self.order:
            raise InputError(f"order is {order}: give 1 to {self.order}, the order of the table")
        return self.replace(levels=self.levels[: order - 1])

    def with_vocab_size(self, vocab_size: int) -> "NgramDraft":
        """Pads the unigrams with zeros to ``vocab_size``; raises ``InputError`` if that is less."""
        missing = vocab_size - self.vocab_size
        if missing < 0:
            raise InputError(
                f"the n-grams have {self.vocab_size} tokens and the target {vocab_size}: "
                "give n-grams that were counted with the target's vocabulary"
            )
        return self.replace(unigram=jnp.pad(self.unigram, (0, missing)))

    def next_probs(self, window: Int[Array, "window"]) -> Float32[Array, "vocab"]:
        """Returns the next token's distribution, before any temperature, after a window of text.

        ``window`` has the last ``order - 1`` tokens; -1 fills it before the start token.
        """
        probs, context = self.unigram, jnp.int32(0)
        for back, level in enumerate(self.levels, start=1):
            context = level.find(context, window[-back])
            successors, masses = level.followed_by(context, self.max_successors)
            probs = (probs * (1 - jnp.sum(masses))).at[successors].add(masses)
        return probs

    def propose(
        self, state: DraftState, context: Context, gamma: int
    ) -> tuple[Proposal, DraftState]:
        """Proposes ``gamma`` tokens, each sampled given those before it."""

        def score(window, tokens):
            window = jnp.concatenate([window, tokens], axis=1)[:, 1:]
            # Padding of the vocabulary has minus infinity, and is never sampled.
            return jnp.log(jax.vmap(self.next_probs)(window))[:, None], None, window

        logits, _, window = score(self._window(context), context.last_tokens[:, None])
        proposal, _ = draft_tokens(score, window, logits[:, 0], context, self.settings, gamma)
        return proposal, state

    def _window(self, context: Context) -> Int[Array, "batch window"]:
        """Returns the ``order - 1`` tokens before each row's last, -1 before the start token."""
        positions = context.lengths[:, None] + jnp.arange(1 - self.order, 0)[None, :]
        tokens = jnp.take_along_axis(context.sequences, jnp.maximum(positions, 0), axis=1)
        return jnp.where(positions >= 0, tokens, _NO_TOKEN)
