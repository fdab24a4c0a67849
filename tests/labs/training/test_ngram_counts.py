"""Counted n-grams against a recount with dictionaries and fractions."""

import functools
from collections import Counter, defaultdict
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_t5x.errors import InputError
from spec_t5x.labs.training.ngram_counts import count_ngrams, join_texts
from spec_t5x.types import EOS_ID, PAD_ID

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB = 6


class Recount:
    """The same law, from its definition: exact and slow."""

    def __init__(self, texts, *, min_count, max_successors):
        self.min_count, self.max_successors = min_count, max_successors
        self.followers = defaultdict(Counter)
        for text in texts:
            whole = (PAD_ID, *text)
            for end in range(1, len(whole)):
                for start in range(end + 1):
                    self.followers[whole[start:end]][whole[end]] += 1

    def stored(self, context) -> dict[int, Fraction]:
        counts = self.followers.get(context, Counter())
        masses = {
            token: Fraction((count - Fraction(3, 4)) / counts.total() * 65536 // 1, 65536)
            for token, count in counts.items()
            if count >= self.min_count
        }
        likeliest = sorted(masses, key=lambda token: (-masses[token], token))
        return {token: masses[token] for token in likeliest[: self.max_successors]}

    def law(self, context) -> list[Fraction]:
        """Computes the probabilities after a context."""
        if not context:
            counts = self.followers[()]
            rest = Fraction(3, 4) * len(counts) / VOCAB
            taken = [max(counts[token] - Fraction(3, 4), 0) for token in range(VOCAB)]
            return [(each + rest) / counts.total() for each in taken]
        stored, shorter = self.stored(context), self.law(context[1:])
        rest = 1 - sum(stored.values())
        return [stored.get(token, 0) + rest * shorter[token] for token in range(VOCAB)]


@functools.partial(jax.jit, static_argnames="order")
def laws_after(draft, windows, order):
    return jax.vmap(draft.with_order(order).next_probs)(windows)


texts_of_some = st.lists(
    st.lists(st.integers(2, VOCAB - 1), max_size=9).map(lambda text: [*text, EOS_ID]),
    min_size=4,
    max_size=20,
)


@settings(max_examples=10)
@given(
    texts=texts_of_some,
    order=st.integers(1, 4),
    min_count=st.integers(1, 2),
    max_successors=st.integers(1, VOCAB),
    seed=st.integers(0, 99),
)
def test_probabilities_are_those_of_a_recount(texts, order, min_count, max_successors, seed):
    options = {"min_count": min_count, "max_successors": max_successors}
    # So that something of every order is left.
    texts = [*texts, *[[2, 3, 4, EOS_ID]] * 2]
    recount = Recount(texts, **options)
    draft = count_ngrams(join_texts(texts), VOCAB, order=order, **options)
    assert draft.order == order

    # Contexts as they occur, the first ones of a text cut short; and any others.
    seen = [(-1,) * 3 + (PAD_ID, *text)[:-1] for text in texts]
    seen = [text[i : i + 3] for text in seen for i in range(1, len(text) - 2)][:40]
    others = np.random.default_rng(seed).integers(0, VOCAB, (60 - len(seen), 3))
    contexts = [*seen, *map(tuple, others.tolist())]
    windows = jnp.asarray([context[3 - (order - 1) :] for context in contexts], jnp.int32)
    found = laws_after(draft, windows.reshape(len(contexts), order - 1), order)
    for law, context in zip(np.asarray(found, np.float64), contexts, strict=True):
        known = tuple(token for token in context[3 - (order - 1) :] if token >= 0)
        np.testing.assert_allclose(law, np.array(recount.law(known), float), rtol=1e-5)
        assert law.sum() == pytest.approx(1, abs=1e-6)
        assert law.min() > 0


def test_lower_orders_are_those_counted_alone():
    rng = np.random.default_rng(1)
    texts = [[*rng.integers(2, VOCAB, n).tolist(), EOS_ID] for n in rng.integers(3, 12, 60)]
    of_trigrams, of_bigrams = (
        laws_after(
            count_ngrams(join_texts(texts), VOCAB, order=order), jnp.arange(VOCAB)[:, None], 2
        )
        for order in (3, 2)
    )
    np.testing.assert_array_equal(of_trigrams, of_bigrams)


def test_ids_beyond_two_bytes():
    large, vocab_size = 65_536 + 7, 70_000
    texts = [[2, large, 3, EOS_ID], [7, 4, 4, EOS_ID], [2, large, 3, EOS_ID]]
    draft = count_ngrams(join_texts(texts), vocab_size, order=3)
    laws = laws_after(draft, jnp.array([[2, large], [0, 2], [2, 7]]), 3)
    assert np.argmax(laws[0]) == 3
    assert np.argmax(laws[1]) == large
    # 7 is another token than the large one, and its successor occurred but once.
    np.testing.assert_array_equal(laws[2], draft.unigram)


def test_a_context_without_entries_is_on_the_way_to_longer_ones():
    # Every token follows 2, each with a mass that two bytes round to nothing.
    vocab_size = 66_000
    texts = [[token, 2, token, EOS_ID] for token in range(3, vocab_size)] * 2
    draft = count_ngrams(join_texts(texts), vocab_size, order=3)
    (after_2,) = np.flatnonzero(draft.levels[0].tokens == 2)
    assert draft.levels[0].starts[after_2] == draft.levels[0].starts[after_2 + 1]
    law = laws_after(draft, jnp.array([[5, 2], [0, 2]]), 3)
    assert law[0, 5] == pytest.approx(1.25 / 2, abs=1e-4)
    assert law[1, 5] < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 0}, "order is 0: give at least 1"),
        ({"vocab_size": 5}, "token 5 is outside a vocabulary of 5"),
        ({"min_count": 500}, "no 2 tokens occur together 500 times"),
        ({"order": 9, "min_count": 1}, "no 7 tokens occur together 1 times"),
    ],
)
def test_counts_that_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        count_ngrams(join_texts([[2, 3, 4, 5, EOS_ID]] * 3), **{"vocab_size": VOCAB, **options})


def test_each_text_follows_a_start_token():
    corpus = join_texts([[2, 3, 1], [1], [4, 1]])
    assert (corpus.num_texts, corpus.num_predicted) == (3, 6)
    np.testing.assert_array_equal(corpus.tokens, [0, 2, 3, 1, 0, 1, 0, 4, 1])
    np.testing.assert_array_equal(corpus.positions, [0, 1, 2, 3, 0, 1, 0, 1, 2])
