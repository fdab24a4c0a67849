"""Counting n-grams: from token ids to the tables of ``drafts.ngram.NgramDraft``.

Absolute discounting (Ney, Essen and Kneser 1994): of what was counted, a constant share
of one occurrence is taken from every n-gram, and what was taken goes to the shorter
context. Rare n-grams are left out, with all of their mass.

    mass_h(w) = (count(h w) - 3/4) / count(h), rounded down

Every order is counted as it stands in the text, so the lower orders of a table are good
drafts of their own (Kneser and Ney's counts of continuations would not be).
"""

import dataclasses
from collections.abc import Iterable

import jax
import numpy as np

from spec_t5x.drafts.ngram import MASS_UNITS, ContextLevel, NgramDraft
from spec_t5x.errors import InputError, check_numbers
from spec_t5x.labs.training.batching import Ids, join_pairs
from spec_t5x.types import PAD_ID, Bool, Float32, Int

# What is taken from every count, in quarters. Estimates from counts of counts lie between
# 0.6 and 0.9 for all orders of natural text.
_DISCOUNT_QUARTERS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Concatenated texts, each after its start token."""

    tokens: Int[np.ndarray, "tokens"]
    # Position of each token in its text; the start token's is 0.
    positions: Int[np.ndarray, "tokens"]

    @property
    def num_texts(self) -> int:
        """Number of start tokens."""
        return int(np.count_nonzero(self.positions == 0))

    @property
    def num_predicted(self) -> int:
        """Tokens to count: all but the start tokens."""
        return len(self.tokens) - self.num_texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counts:
    """All contexts of one length, and what followed them, before anything is left out."""

    # Of each context: index of the shorter one, and the token in front of that.
    shorter: Int[np.ndarray, "contexts"]
    tokens: Int[np.ndarray, "contexts"]
    # Of each n-gram: index of its context, its last token, and how often it occurred.
    contexts: Int[np.ndarray, "ngrams"]
    successors: Int[np.ndarray, "ngrams"]
    counts: Int[np.ndarray, "ngrams"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entries:
    """The n-grams that are stored; those of a context stand together, likeliest first."""

    contexts: Int[np.ndarray, "entries"]
    successors: Int[np.ndarray, "entries"]
    masses: Int[np.ndarray, "entries"]


def join_texts(texts: Iterable[Ids]) -> Corpus:
    """Concatenates texts: token ids without a start token, with an end-of-sequence token."""
    pairs = join_pairs(((), text) for text in texts)
    lengths = pairs.target_lengths
    starts = pairs.target_ends - lengths
    tokens = np.insert(pairs.target_ids.astype(np.int64), starts, PAD_ID)
    # Each start token moves what follows by one.
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
    """The draft with the tables of a corpus. Equal arguments give equal tables.

    Args:
      corpus: the texts (``join_texts``).
      vocab_size: number of token ids.
      order: length of the longest n-grams, at least 1.
      min_count: n-grams of two tokens and more that occur less often are left out.
      max_successors: tokens stored for each context at most: the likeliest ones, of
        several the ones with the lowest ids.

    Raises:
      InputError: an argument below 1, a token outside the vocabulary, or nothing left
        of an order.
    """
    check_numbers(1, order=order, min_count=min_count, max_successors=max_successors)
    _check_ids(corpus, vocab_size)
    counts, entries = [], []
    for length, counted in enumerate(_count_by_length(corpus, vocab_size, order), start=1):
        counts.append(counted)
        entries.append(_entries(counted, min_count, max_successors))
        if not len(entries[-1].masses):
            raise InputError(
                f"no {length + 1} tokens occur together {min_count} times: "
                "lower order or min_count, or give more text"
            )
    draft = NgramDraft(
        unigram=_unigram(corpus, vocab_size),
        levels=_levels(counts, entries, vocab_size),
        max_successors=max((_longest_run(entry.contexts) for entry in entries), default=0),
    )
    return jax.device_put(draft)


def _check_ids(corpus: Corpus, vocab_size: int) -> None:
    lowest, highest = corpus.tokens.min(), corpus.tokens.max()
    if lowest < 0 or highest >= vocab_size:
        token = lowest if lowest < 0 else highest
        raise InputError(
            f"token {token} is outside a vocabulary of {vocab_size}: "
            "give the vocabulary that the texts were tokenised with"
        )


def _count_by_length(corpus: Corpus, vocab_size: int, order: int) -> Iterable[_Counts]:
    """What followed contexts of 1 … order - 1 tokens."""
    tokens, positions = corpus.tokens, corpus.positions
    # Where the contexts end that a token of the same text follows, and which shorter
    # context ends there: at first the empty one.
    ends = np.flatnonzero(positions[1:] > 0)
    shorter = np.zeros(len(ends), np.int64)
    for length in range(1, order):
        reaches = positions[ends] >= length - 1
        ends, shorter = ends[reaches], shorter[reaches]
        keys = shorter * vocab_size + tokens[ends - (length - 1)]
        of_contexts, contexts = np.unique(keys, return_inverse=True)
        of_ngrams, counts = np.unique(contexts * vocab_size + tokens[ends + 1], return_counts=True)
        yield _Counts(
            shorter=of_contexts // vocab_size,
            tokens=of_contexts % vocab_size,
            contexts=of_ngrams // vocab_size,
            successors=of_ngrams % vocab_size,
            counts=counts,
        )
        shorter = contexts


def _entries(counted: _Counts, min_count: int, max_successors: int) -> _Entries:
    """The n-grams that are common enough, with their masses."""
    # Exact: sums of integers below 2**53.
    totals = np.bincount(counted.contexts, weights=counted.counts).astype(np.int64)
    quarters = 4 * counted.counts - _DISCOUNT_QUARTERS
    masses = quarters * (MASS_UNITS // 4) // totals[counted.contexts]
    kept = np.flatnonzero((counted.counts >= min_count) & (masses > 0))
    contexts, successors = counted.contexts[kept], counted.successors[kept]
    masses = masses[kept]

    by_mass = np.lexsort((successors, -masses, contexts))
    contexts, successors, masses = contexts[by_mass], successors[by_mass], masses[by_mass]
    ranks = np.arange(len(contexts)) - np.searchsorted(contexts, contexts)
    likely = ranks < max_successors
    return _Entries(contexts=contexts[likely], successors=successors[likely], masses=masses[likely])


def _levels(
    counts: list[_Counts], entries: list[_Entries], vocab_size: int
) -> tuple[ContextLevel, ...]:
    """The trie of the contexts that anything is stored for, renumbered."""
    token_type = np.uint16 if vocab_size <= 1 << 16 else np.int32
    levels, above = [], np.ones(1, bool)
    for counted, entry, kept in zip(counts, entries, _kept(counts, entries), strict=True):
        levels.append(
            ContextLevel(
                first=_offsets(counted.shorter[kept], above),
                tokens=counted.tokens[kept].astype(token_type),
                starts=_offsets(entry.contexts, kept),
                successors=entry.successors.astype(token_type),
                masses=entry.masses.astype(np.uint16),
            )
        )
        above = kept
    return tuple(levels)


def _kept(counts: list[_Counts], entries: list[_Entries]) -> list[Bool[np.ndarray, "contexts"]]:
    """Which contexts have entries, or are part of a longer one that is kept."""
    levels, of_longer = [], np.zeros(0, np.int64)
    for counted, entry in zip(reversed(counts), reversed(entries), strict=True):
        kept = np.zeros(len(counted.tokens), bool)
        kept[entry.contexts] = True
        kept[of_longer] = True
        levels.append(kept)
        of_longer = counted.shorter[kept]
    return levels[::-1]


def _offsets(
    owners: Int[np.ndarray, "items"], kept: Bool[np.ndarray, "contexts"]
) -> Int[np.ndarray, "kept_and_one"]:
    """Where the items of each kept context begin, given the sorted owners of all items."""
    bounds = np.append(np.flatnonzero(kept), len(kept))
    return np.searchsorted(owners, bounds).astype(np.int32)


def _longest_run(owners: Int[np.ndarray, "items"]) -> int:
    return int(np.bincount(owners).max())


def _unigram(corpus: Corpus, vocab_size: int) -> Float32[np.ndarray, "vocab"]:
    """Discounted frequencies; what was taken is shared out among all tokens."""
    counts = np.bincount(corpus.tokens[corpus.positions > 0], minlength=vocab_size)
    discounted = np.maximum(counts - _DISCOUNT_QUARTERS / 4, 0)
    rest = counts.sum() - discounted.sum()
    return ((discounted + rest / vocab_size) / counts.sum()).astype(np.float32)
