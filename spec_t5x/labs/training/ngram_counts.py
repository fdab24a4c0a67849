"""Counts of n-grams: from token ids to the tables of ``drafts.ngram.NgramDraft``.

Absolute discounting (Ney, Essen and Kneser 1994) subtracts 3/4 from the count of each token w after
a context h. The mass that this frees, and that of n-grams too rare to be stored, belongs to the
context that is one token shorter.

    mass_h(w) = (count(h w) - 3/4) / count(h), rounded down

Lower orders have the counts of the text and not Kneser and Ney's counts of continuations, so that
they are good drafts as well.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from spec_t5x.drafts.ngram import MASS_UNITS, ContextLevel, NgramDraft
from spec_t5x.errors import InputError, check_numbers
from spec_t5x.labs.training.batching import Ids, join_pairs
from spec_t5x.types import PAD_ID, Bool, Float32, Int

# The discount of every count, in quarters of an occurrence. Estimates from counts of counts are
# between 0.6 and 0.9 occurrences for all orders of natural text.
_DISCOUNT_QUARTERS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Concatenated texts; each begins with the start token, which is not predicted."""

    tokens: Int[np.ndarray, "tokens"]
    # Position of each token in its text; the start token's is 0.
    positions: Int[np.ndarray, "tokens"]

    @property
    def num_texts(self) -> int:
        """Number of texts, which is that of start tokens."""
        return int(np.count_nonzero(self.positions == 0))

    @property
    def num_predicted(self) -> int:
        """Number of tokens to count: all but the start tokens."""
        return len(self.tokens) - self.num_texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counts:
    """All contexts of one length in a corpus, and the n-grams to store: a context and a token."""

    # For each context: the index of the context without its first token, and that token.
    shorter: Int[np.ndarray, "contexts"]
    tokens: Int[np.ndarray, "contexts"]
    # For each n-gram, ordered by context and then the likeliest first: the index of its context,
    # its last token, and its mass in units of 1 / MASS_UNITS.
    contexts: Int[np.ndarray, "entries"]
    successors: Int[np.ndarray, "entries"]
    masses: Int[np.ndarray, "entries"]


def join_texts(texts: Iterable[Ids]) -> Corpus:
    """Concatenates texts, each given as token ids with EOS and without a start token."""
    joined = join_pairs(((), text) for text in texts).target
    lengths, starts = joined.lengths, joined.ends - joined.lengths
    tokens = np.insert(joined.ids.astype(np.int64), starts, PAD_ID)
    # Each start token moves the tokens after it by one.
    starts = np.repeat(starts + np.arange(len(starts)), lengths + 1)
    return Corpus(tokens=tokens, positions=np.arange(len(tokens)) - starts)


def count_ngrams(
    corpus: Corpus,
    vocab_size: int,
    *,
    order: int = 3,
    min_count: int = 2,
    max_successors: int = 64,
) -> NgramDraft:
    """Makes an n-gram draft from a corpus. Equal arguments give equal tables.

    The longest n-grams have ``order`` tokens. N-grams of two tokens and more that occur less than
    ``min_count`` times are not stored. A context stores the ``max_successors`` likeliest tokens, of
    equally likely ones those with the lowest ids.

    Raises:
      InputError: an argument is below 1, a token is outside the vocabulary, or no n-gram
        of some length is stored.
    """
    check_numbers(1, order=order, min_count=min_count, max_successors=max_successors)
    for token in (corpus.tokens.min(), corpus.tokens.max()):
        if not 0 <= token < vocab_size:
            raise InputError(
                f"token {token} is outside a vocabulary of {vocab_size}: "
                "give the vocabulary that the texts were tokenised with"
            )
    counts = []
    for counted in _count_by_length(corpus, vocab_size, order, min_count, max_successors):
        counts.append(counted)
        if not len(counted.masses):
            raise InputError(
                f"no {len(counts) + 1} tokens occur together {min_count} times: "
                "lower order or min_count, or give more text"
            )
    draft = NgramDraft(
        unigram=_unigram(corpus, vocab_size),
        levels=_levels(counts, vocab_size),
        max_successors=max((int(np.bincount(each.contexts).max()) for each in counts), default=0),
    )
    return jax.device_put(draft)


def _count_by_length(
    corpus: Corpus, vocab_size: int, order: int, min_count: int, max_successors: int
) -> Iterable[_Counts]:
    """Yields the counts of contexts of 1, 2, … order - 1 tokens, in this order."""
    tokens, positions = corpus.tokens, corpus.positions
    # Last positions of contexts that a token of the same text follows, and the index of the
    # one token shorter context that ends there: at first the empty one.
    ends = np.flatnonzero(positions[1:] > 0)
    shorter = np.zeros(len(ends), np.int64)
    for length in range(1, order):
        reaches = positions[ends] >= length - 1
        ends, shorter = ends[reaches], shorter[reaches]
        keys = shorter * vocab_size + tokens[ends - (length - 1)]
        of_contexts, shorter = np.unique(keys, return_inverse=True)
        of_ngrams, counts = np.unique(shorter * vocab_size + tokens[ends + 1], return_counts=True)
        contexts, successors = np.divmod(of_ngrams, vocab_size)
        # Exact, because float64 holds integers up to 2**53.
        totals = np.bincount(contexts, weights=counts).astype(np.int64)
        masses = (4 * counts - _DISCOUNT_QUARTERS) * (MASS_UNITS // 4) // totals[contexts]
        order_of = np.lexsort((successors, -masses, contexts))
        order_of = order_of[(counts[order_of] >= min_count) & (masses[order_of] > 0)]
        contexts, successors, masses = contexts[order_of], successors[order_of], masses[order_of]
        likely = np.arange(len(contexts)) - np.searchsorted(contexts, contexts) < max_successors
        yield _Counts(
            shorter=of_contexts // vocab_size,
            tokens=of_contexts % vocab_size,
            contexts=contexts[likely],
            successors=successors[likely],
            masses=masses[likely],
        )


def _levels(counts: Sequence[_Counts], vocab_size: int) -> tuple[ContextLevel, ...]:
    """Makes the draft's trie, without contexts that have neither n-grams nor longer contexts."""
    token_type = np.uint16 if vocab_size <= 1 << 16 else np.int32
    # A context is kept if it has n-grams, or if it is the end of a longer context that is kept.
    all_kept, of_longer = [], np.zeros(0, np.int64)
    for counted in reversed(counts):
        kept = np.zeros(len(counted.tokens), bool)
        kept[counted.contexts] = True
        kept[of_longer] = True
        all_kept.insert(0, kept)
        of_longer = counted.shorter[kept]
    levels, above = [], np.ones(1, bool)
    for counted, kept in zip(counts, all_kept, strict=True):
        levels.append(
            ContextLevel(
                first=_offsets(counted.shorter[kept], above),
                tokens=counted.tokens[kept].astype(token_type),
                starts=_offsets(counted.contexts, kept),
                successors=counted.successors.astype(token_type),
                masses=counted.masses.astype(np.uint16),
            )
        )
        above = kept
    return tuple(levels)


def _offsets(
    owners: Int[np.ndarray, "items"], kept: Bool[np.ndarray, "contexts"]
) -> Int[np.ndarray, "kept_and_one"]:
    """Returns the index of each kept context's first item, and the end; ``owners`` is sorted."""
    bounds = np.append(np.flatnonzero(kept), len(kept))
    return np.searchsorted(owners, bounds).astype(np.int32)


def _unigram(corpus: Corpus, vocab_size: int) -> Float32[np.ndarray, "vocab"]:
    """Computes token probabilities: discounted frequencies, plus equal shares of the discounts."""
    counts = np.bincount(corpus.tokens[corpus.positions > 0], minlength=vocab_size)
    discounted = np.maximum(counts - _DISCOUNT_QUARTERS / 4, 0)
    rest = counts.sum() - discounted.sum()
    return ((discounted + rest / vocab_size) / counts.sum()).astype(np.float32)
