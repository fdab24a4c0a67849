"""Tests of n-gram drafts: their proposals, and the target's text and law with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.drafts.ngram import MASS_UNITS, ContextLevel, NgramDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Context, Draft
from spec_t5x.labs.testing.toy_models import TableTarget
from spec_t5x.labs.training.ngram_counts import count_ngrams, join_texts
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.outputs import row_keys
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.sampling.distributions import sampling
from spec_t5x.sampling.draws import RowStream, draft_draws
from spec_t5x.types import EOS_ID, PAD_ID
from spec_t5x.verifiers import CoupledVerifier

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB = 12
GREEDY, SAMPLED = sampling(0.0), sampling(1.0)
# Texts of unequal lengths; the tokens beyond a length must have no effect.
SEQUENCES = jnp.array([[0, 9, 9, 9, 9, 9], [0, 5, 9, 9, 9, 9], [0, 7, 8, 2, 9, 9]])
LENGTHS = jnp.array([0, 1, 3])


def random_texts(seed, vocab_size, num=80):
    """Makes texts in which some tokens follow others more often."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(num):
        text = [int(rng.integers(2, vocab_size))]
        for _ in range(rng.integers(1, 9)):
            jump = rng.choice([1, 3, 4], p=[0.7, 0.2, 0.1])
            text.append(2 + (text[-1] - 2 + int(jump)) % (vocab_size - 2))
        texts.append([*text, EOS_ID])
    return texts


@functools.cache
def ngrams(vocab_size=VOCAB, order=3) -> NgramDraft:
    return count_ngrams(join_texts(random_texts(0, vocab_size)), vocab_size, order=order)


@functools.partial(jax.jit, static_argnames="gamma")
def propose(draft, sequences, lengths, keys, settings, gamma):
    context = Context(
        sequences=sequences,
        lengths=lengths,
        live=jnp.ones(len(lengths), bool),
        draws=draft_draws(RowStream(keys), lengths, coupled=False),
        settings=settings,
        target_cache=(),
    )
    return draft.propose((), context, gamma)[0]


KEYS = row_keys(jax.random.key(0), 3)


def test_continues_the_text_it_was_counted_in():
    texts = [[3, 4, 5, 6, 7, EOS_ID], [8, 4, 9, 7, 10, EOS_ID]] * 3
    draft = count_ngrams(join_texts(texts), VOCAB, order=3)
    assert isinstance(draft, Draft)
    sequences = jnp.array([[0, 3, 4, 2, 2], [0, 8, 4, 2, 2], [0, 6, 7, 2, 2], [0, 2, 2, 2, 2]])
    keys = row_keys(jax.random.key(0), 4)
    proposal = propose(draft, sequences, jnp.array([2, 2, 2, 0]), keys, GREEDY, 3)
    # The tokens after 4 and 7 depend on the token before; half of the texts begin with 3, half with
    # 8, and the first of several is proposed.
    expected = [[5, 6, 7], [9, 7, 10], [EOS_ID, EOS_ID, EOS_ID], [3, 4, 5]]
    np.testing.assert_array_equal(proposal.tokens, expected)
    np.testing.assert_array_equal(proposal.num_proposed, [3, 3, 3, 3])


def test_before_the_start_token_there_is_nothing():
    # No vocabulary makes padding in a text: two start tokens would be before a 5.
    texts = [[PAD_ID, 5, EOS_ID]] * 2 + [[6, 7, EOS_ID]] * 3
    draft = count_ngrams(join_texts(texts), VOCAB, order=3)
    proposal = propose(draft, SEQUENCES, jnp.zeros(3, jnp.int32), KEYS, GREEDY, 2)
    np.testing.assert_array_equal(proposal.tokens, [[6, 7]] * 3)


def test_a_context_that_is_not_stored_is_no_other_one():
    pair = jnp.array([0, 1, 2])
    level = ContextLevel(
        first=pair, tokens=jnp.array([3, 5]), starts=pair, successors=pair[:2], masses=pair[1:]
    )
    found = [
        [int(level.find(*map(jnp.int32, each))) for each in ((i, 3), (i, 5))] for i in pair - 1
    ]
    assert found == [[-1, -1], [0, -1], [-1, 1]]
    followed = [float(jnp.sum(level.followed_by(i, 3)[1]) * MASS_UNITS) for i in pair - 1]
    assert followed == [0, 1, 2]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_every_token_is_drawn_given_those_before_it(order):
    draft = ngrams().with_order(order)
    assert draft.order == order
    proposal = propose(draft, SEQUENCES, LENGTHS, KEYS, SAMPLED, 4)
    law = jax.jit(lambda draft, window: draft.next_probs(window))
    for row, length in enumerate(LENGTHS.tolist()):
        text = [-1, *SEQUENCES[row, : length + 1].tolist()]
        for place, token in enumerate(proposal.tokens[row].tolist()):
            window = jnp.asarray(text[len(text) - (order - 1) :], jnp.int32)
            np.testing.assert_allclose(proposal.probs[row, place], law(draft, window), rtol=1e-5)
            assert proposal.probs[row, place, token] > 0
            text.append(token)


def test_a_rows_proposals_do_not_depend_on_the_rows_beside_it():
    together = propose(ngrams(), SEQUENCES, LENGTHS, KEYS, SAMPLED, 4)
    for row in range(3):
        rows = jnp.array([row, (row + 1) % 3])
        fewer = propose(ngrams(), SEQUENCES[rows], LENGTHS[rows], KEYS[rows], SAMPLED, 4)
        np.testing.assert_array_equal(fewer.tokens[0], together.tokens[row])
        np.testing.assert_allclose(fewer.probs[0], together.probs[row], rtol=1e-6)
    assert len({tuple(tokens) for tokens in together.tokens.tolist()}) == 3


def test_its_own_settings_come_before_the_targets():
    greedy = propose(ngrams(), SEQUENCES, LENGTHS, KEYS, GREEDY, 3)
    own = propose(ngrams().replace(settings=GREEDY), SEQUENCES, LENGTHS, KEYS, SAMPLED, 3)
    np.testing.assert_array_equal(own.tokens, greedy.tokens)
    np.testing.assert_array_equal(own.distributions(VOCAB), jax.nn.one_hot(greedy.tokens, VOCAB))


def test_padding_of_the_vocabulary_is_never_proposed():
    padded = ngrams().with_vocab_size(VOCAB + 4)
    assert padded.vocab_size == VOCAB + 4
    proposal = propose(padded, SEQUENCES, LENGTHS, KEYS, SAMPLED, 3)
    assert np.all(proposal.probs[..., VOCAB:] == 0)
    np.testing.assert_allclose(np.sum(proposal.probs, axis=-1), 1, atol=1e-6)


def test_refuses_orders_and_vocabularies_that_it_lacks():
    for order in (0, 4):
        with pytest.raises(InputError, match=f"order is {order}: give 1 to 3"):
            ngrams().with_order(order)
    with pytest.raises(InputError, match="have 12 tokens and the target 11"):
        ngrams().with_vocab_size(11)


def test_coupled_the_text_depends_on_the_key_alone():
    target = TableTarget.create(seed=0, vocab_size=VOCAB, contexts=5)
    sources = jnp.array([[5, 6, 7, 1], [9, 4, 1, 0], [3, 1, 0, 0]])
    arguments = sources, jnp.array([[0, 0, 0], [0, 7, 0], [0, 3, 9]]), jax.random.key(1), SAMPLED
    plain = autoregressive_decode(target, *arguments, coupled=True, max_decode_len=20)
    options = {"gamma": 3, "max_decode_len": 20, "verifier": CoupledVerifier()}
    decoded = speculative_decode(target, ngrams(), *arguments, **options)
    np.testing.assert_array_equal(decoded.tokens, plain.tokens)
    assert np.sum(decoded.stats.accepted) > 0
