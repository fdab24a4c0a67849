"""N-grams: the next token from the last few, by a table counted from text (section 3.6).

The paper's Table 3 has unigrams and bigrams as the drafts that cost next to nothing; this
is the general case. What followed a context is stored for the commonest tokens, and what
mass is left goes to the context that is one token shorter:

    q(w | h) = mass_h(w) + (1 - sum mass_h) q(w | h without its first token)

down to the unigrams. That is a distribution for every context, seen or not, whatever was
left out of the table. ``training/ngram_counts.py`` makes the masses, by absolute
discounting (Ney, Essen and Kneser 1994).
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_t5x.drafts.sequential import draw_token
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, Draft, DraftState, Proposal
from spec_t5x.sampling.distributions import Sampling
from spec_t5x.types import Array, Float32, Int, Integer

# Masses are whole numbers of 1 / MASS_UNITS, rounded down: they take two bytes, their
# sums are exact in float32, and something is always left for the shorter context.
MASS_UNITS = 1 << 16

# Stands for what is before the start token; no context has it.
_NO_TOKEN = -1
# Index of a context that is not stored.
_NOT_STORED = -1


@flax.struct.dataclass(kw_only=True)
class ContextLevel:
    """The stored contexts of one length, and the tokens that followed them.

    The levels are a trie that reads the text backwards: a context is one of the level
    above, which is one token shorter, and the token before that. Above the first level
    is the empty context alone. Contexts are ordered by their shorter one, then by that
    token.
    """

    # The contexts that extend context i of the level above: first[i] … first[i + 1] - 1.
    first: Int[Array, "above_and_one"]
    # The token that each context has in front of the shorter one.
    tokens: Integer[Array, "contexts"]
    # What followed context i: starts[i] … starts[i + 1] - 1.
    starts: Int[Array, "contexts+1"]
    # Tokens that followed, the likeliest first.
    successors: Integer[Array, "entries"]
    # Their masses in units of 1 / MASS_UNITS; less than 1 in all for each context.
    masses: Integer[Array, "entries"]

    def find(self, shorter: Int[Array, ""], token: Int[Array, ""]) -> Int[Array, ""]:
        """Index of the context that has ``token`` in front of ``shorter``; -1 for none.

        Args:
          shorter: index in the level above; of a context that is not stored (-1), no
            longer one is.
          token: the token before it.
        """
        low, end = self.first[shorter], self.first[shorter + 1]
        high = end
        # As many steps as the whole level could need: a fixed number, which compiles
        # into straight-line code.
        for _ in range(self.tokens.shape[0].bit_length()):
            middle = (low + high) // 2
            is_before = (low < high) & (self.tokens[middle] < token)
            low, high = jnp.where(is_before, middle + 1, low), jnp.where(is_before, high, middle)
        found = (shorter >= 0) & (low < end) & (self.tokens[low] == token)
        return jnp.where(found, low, _NOT_STORED)

    def followed_by(
        self, context: Int[Array, ""], num: int
    ) -> tuple[Integer[Array, "num"], Float32[Array, "num"]]:
        """The first ``num`` tokens that followed a context, and their masses.

        Masses are zero beyond the last token, and for a context that is not stored (-1).
        """
        indices = self.starts[context] + jnp.arange(num)
        is_there = (context >= 0) & (indices < self.starts[context + 1])
        masses = jnp.where(is_there, self.masses[indices], 0).astype(jnp.float32)
        return self.successors[indices], masses / MASS_UNITS


@flax.struct.dataclass(kw_only=True)
class NgramDraft(Draft):
    """Proposes from the distribution of the next token given the last ``order - 1``.

    The start token is a context like any other; before it there is nothing, so that the
    first tokens of a text have shorter contexts. Read one from disk with
    ``checkpoints.ngram_tables.load_ngram``.
    """

    # Probability of each token without any context.
    unigram: Float32[Array, "vocab"]
    # Contexts of one token, of two, …; none for a unigram draft.
    levels: tuple[ContextLevel, ...] = ()
    # How this draft samples; None takes the target's settings.
    settings: Sampling | None = None
    # Most successors of any stored context.
    max_successors: int = flax.struct.field(pytree_node=False, default=0)

    @property
    def vocab_size(self) -> int:
        """Number of unigrams, padding of the vocabulary included."""
        return self.unigram.shape[0]

    @property
    def order(self) -> int:
        """1 for unigrams, 2 for bigrams, …"""
        return 1 + len(self.levels)

    def with_order(self, order: int) -> "NgramDraft":
        """The draft of a lower order, from the same counts.

        Raises:
          InputError: ``order`` is not 1 … ``self.order``.
        """
        if not 1 <= order <= self.order:
            raise InputError(f"order is {order}: give 1 to {self.order}, the order of the table")
        return self.replace(levels=self.levels[: order - 1])

    def with_vocab_size(self, vocab_size: int) -> "NgramDraft":
        """The draft for a target whose vocabulary is padded to ``vocab_size``.

        Raises:
          InputError: the table has more tokens than that.
        """
        missing = vocab_size - self.vocab_size
        if missing < 0:
            raise InputError(
                f"the n-grams have {self.vocab_size} tokens and the target {vocab_size}: "
                "give n-grams that were counted with the target's vocabulary"
            )
        return self.replace(unigram=jnp.pad(self.unigram, (0, missing)))

    def next_probs(self, window: Int[Array, "window"]) -> Float32[Array, "vocab"]:
        """Distribution of the token that follows ``window``, before any temperature.

        Args:
          window: the last ``order - 1`` tokens; -1 for what is before the start token.
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
        """``gamma`` tokens, each sampled given the ones before it."""
        settings = context.settings if self.settings is None else self.settings

        def draft_one(carry, offset):
            window, draws, tokens = carry
            # Minus infinity for padding of the vocabulary, which is never sampled.
            logits = jnp.log(jax.vmap(self.next_probs)(window))
            logits = context.ruled(logits[:, None], tokens, offset)[:, 0]
            token, probs, draws = draw_token(logits, draws, settings)
            window = jnp.concatenate([window, token[:, None]], axis=1)[:, 1:]
            return (window, draws, tokens.at[:, offset].set(token)), probs

        nothing = jnp.zeros((context.lengths.shape[0], gamma), jnp.int32)
        start = (self._window(context), context.draws, nothing)
        (_, _, tokens), probs = lax.scan(draft_one, start, jnp.arange(gamma))
        probs = None if probs is None else probs.swapaxes(0, 1)
        return Proposal(tokens, probs, drawn=gamma), state

    def _window(self, context: Context) -> Int[Array, "batch window"]:
        """The last ``order - 1`` tokens of each row."""
        offsets = jnp.arange(2 - self.order, 1)
        positions = context.lengths[:, None] + offsets[None, :]
        tokens = jnp.take_along_axis(context.sequences, jnp.maximum(positions, 0), axis=1)
        return jnp.where(positions >= 0, tokens, _NO_TOKEN)
