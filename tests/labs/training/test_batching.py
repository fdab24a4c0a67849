"""Batches: every pair, the right shapes, and an order that can be resumed."""

import itertools

import numpy as np
import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError
from spec_t5x.labs.training.batching import Batches, join_pairs, tokenise


def make_batches(lengths=300, seed=0, tokens_per_batch=128, buckets=(8, 16, 32)):
    """Batches of random tokens; source i starts with token 3 + i, which identifies it."""
    if isinstance(lengths, int):
        lengths = np.random.default_rng(1).integers(2, 33, (lengths, 2)).tolist()
    rng = np.random.default_rng(0)

    def text(*begin, length):
        return [*begin, *rng.integers(3, 500, length - len(begin) - 1).tolist(), 1]

    pairs = join_pairs(
        (text(3 + i, length=source), text(length=target))
        for i, (source, target) in enumerate(lengths)
    )
    return Batches(pairs, tokens_per_batch=tokens_per_batch, seed=seed, buckets=buckets)


def first_tokens(batches):
    return [t for b in batches for t in b.encoder_input_tokens[: b.num_pairs, 0].tolist()]


def test_arrays_of_a_batch():
    pairs = join_pairs([([7, 8, 1], [9, 1]), ([4, 5, 6, 7, 1], [2, 3, 4, 1])])
    (batch,) = Batches(pairs, tokens_per_batch=24, seed=0, buckets=(8,)).one_pass()
    source = [[7, 8, 1, 0, 0, 0, 0, 0], [4, 5, 6, 7, 1, 0, 0, 0], [0] * 8]
    target = [[9, 1, 0, 0, 0, 0, 0, 0], [2, 3, 4, 1, 0, 0, 0, 0], [0] * 8]
    assert batch.encoder_input_tokens.tolist() == source
    assert batch.decoder_target_tokens.tolist() == target
    assert batch.decoder_input_tokens.tolist() == [[0, *row[:-1]] for row in target]
    assert (batch.num_pairs, batch.num_tokens) == (2, 6)


def test_one_pass_gives_every_pair_once():
    assert sorted(first_tokens(make_batches(101).one_pass())) == list(range(3, 104))


def test_an_epoch_repeats_no_pair_and_later_epochs_give_the_rest():
    batches = make_batches(101)
    stream, seen = batches.batches(), set()
    for _ in range(10):
        epoch = first_tokens(itertools.islice(stream, batches.batches_per_epoch))
        assert len(epoch) == len(set(epoch)) > 101 - 16 - 8 - 4
        seen |= set(epoch)
    assert seen == set(range(3, 104))


def test_a_bucket_smaller_than_a_batch_is_padded():
    batches = make_batches([(5, 5)] * 3, tokens_per_batch=80, buckets=(12,))
    assert batches.batches_per_epoch == 1
    batch = next(batches.batches())
    assert batch.decoder_target_tokens.shape == (6, 12)
    assert batch.num_pairs == 3


@pytest.mark.parametrize("start", [0, 26, 1000])
def test_resuming_gives_the_same_batches(start):
    undisturbed = list(itertools.islice(make_batches().batches(), start, start + 30))
    resumed = list(itertools.islice(make_batches().batches(start), 30))
    assert len(resumed) == 30
    for expected, batch in zip(undisturbed, resumed, strict=True):
        for name in ("encoder_input_tokens", "decoder_input_tokens"):
            np.testing.assert_array_equal(getattr(expected, name), getattr(batch, name))


def test_order_depends_on_seed_and_epoch():
    batches = make_batches()
    per_epoch = batches.batches_per_epoch
    streams = batches.batches(), batches.batches(per_epoch), make_batches(seed=1).batches()
    orders = [first_tokens(itertools.islice(stream, 10)) for stream in streams]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_a_fingerprint_is_of_all_that_determines_a_batch():
    sources = [([5, 6], [7, 8, 1]), ([5], [6, 7, 8, 1]), ([5, 6], [7, 9, 1])]
    batches = [
        Batches(
            join_pairs([(first, [1]), (second, [1])]),
            tokens_per_batch=rows,
            seed=seed,
            buckets=(4,),
        )
        for first, second in sources
        for rows in (8, 16)
        for seed in (0, 1)
    ]
    assert len({each.fingerprint for each in batches}) == len(batches)


def test_the_shorter_side_is_padded_no_further_than_it_needs():
    batches = make_batches([(30, 5), (25, 3), (6, 7)], tokens_per_batch=64)
    shapes = {
        (b.encoder_input_tokens.shape, b.decoder_target_tokens.shape) for b in batches.one_pass()
    }
    # The longer side still decides how many rows there are.
    assert shapes == {((2, 32), (2, 8)), ((8, 8), (8, 8))}


def test_a_pair_of_lengths_has_batches_of_its_shape_if_they_are_many():
    # Two rows fill a batch: 50 of one shape, and too few of two others.
    lengths = [(30, 5)] * 100 + [(6, 30)] * 98 + [(30, 30)] * 2
    batches = make_batches(lengths, tokens_per_batch=64)
    sides = ("encoder_input_tokens", "decoder_target_tokens")
    found = [tuple(getattr(b, side).shape for side in sides) for b in batches.one_pass()]
    assert found == [((2, 32), (2, 8))] * 50 + [((2, 32), (2, 32))] * 50
    assert sorted(first_tokens(batches.one_pass())) == list(range(3, 203))


def tokenised(texts, limits, **options):
    return tokenise(texts, ByteVocabulary(), limits, **options)


def test_tokenising_appends_eos_and_drops_long_and_empty_pairs():
    texts = [("abc", "ab"), ("x" * 10, "y"), ("", "empty"), ("ä", "b")]
    pairs = tokenised(texts, (10, 10))
    assert (len(pairs), pairs.num_dropped) == (2, 2)
    assert [each.tolist() for each in pairs.source.split()] == [[100, 101, 102, 1], [198, 167, 1]]
    assert [each.tolist() for each in pairs.target.split()] == [[100, 101, 1], [101, 1]]
    first = pairs.first(1)
    assert (first.source.ids.tolist(), first.target.lengths.tolist()) == ([100, 101, 102, 1], [3])
    assert len(pairs.first(9)) == 2
    # A limit counts the end of sequence.
    for limits, kept in (((4, 3), 2), ((3, 3), 1), ((4, 2), 1)):
        assert len(tokenised([("abc", "ab"), ("a", "b")], limits)) == kept
    with pytest.raises(InputError, match=r"dev\.tsv: all 4 pairs are empty or longer than 10"):
        tokenised(texts, (1, 10), name="dev.tsv")


def test_lines_are_pairs_without_a_source():
    lines = [(None, text) for text in ("abc", "x", "longer than that", "")]
    pairs = tokenised(lines, (0, 6))
    assert (len(pairs), pairs.num_dropped) == (2, 2)
    (batch,) = Batches(pairs, tokens_per_batch=8, seed=0, buckets=(4, 8)).one_pass()
    assert batch.decoder_target_tokens.tolist() == [[100, 101, 102, 1], [123, 1, 0, 0]]
    assert batch.encoder_input_tokens.shape == (2, 0)
    assert (batch.num_tokens, batch.num_pairs) == (6, 2)


def test_long_sources_can_be_cut_instead_of_dropped():
    texts, limits = [("abcdefgh", "xy"), ("ab", "abcdefgh"), ("ab", "c")], (5, 5)
    dropped, cut = tokenised(texts, limits), tokenised(texts, limits, truncate_sources=True)
    assert (len(dropped), dropped.num_dropped) == (1, 2)
    # A target is never cut: the text would say something else.
    assert (len(cut), cut.num_dropped) == (2, 1)
    assert cut.source.lengths.tolist() == [5, 3]
    assert cut.source.split()[0].tolist() == [*(3 + ord(c) for c in "abcd"), 1]
