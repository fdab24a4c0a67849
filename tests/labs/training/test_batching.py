"""Batches: every pair, the right shapes, and an order that can be resumed."""

import itertools

import numpy as np
import pytest

from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError
from spec_t5x.labs.training import batching
from spec_t5x.labs.training.batching import Batches, join_pairs, tokenise


def make_pairs(lengths, seed=0):
    """Pairs of random tokens; source i starts with token 3 + i, so it can be told."""
    rng = np.random.default_rng(seed)

    def text(*begin, length):
        return [*begin, *rng.integers(3, 500, length - len(begin) - 1).tolist(), 1]

    return join_pairs(
        (text(3 + i, length=source), text(length=target))
        for i, (source, target) in enumerate(lengths)
    )


def random_lengths(number):
    rng = np.random.default_rng(1)
    return [tuple(pair) for pair in rng.integers(2, 33, (number, 2)).tolist()]


def make_batches(number=300, seed=0, **options):
    options = {"tokens_per_batch": 128, "buckets": (8, 16, 32)} | options
    return Batches(make_pairs(random_lengths(number)), seed=seed, **options)


def first_tokens(batch):
    return batch.encoder_input_tokens[: batch.num_pairs, 0].tolist()


def assert_same(left, right):
    for name in ("encoder_input_tokens", "decoder_input_tokens"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


def test_arrays_of_a_batch():
    pairs = make_pairs([(3, 2), (5, 4)])
    batches = Batches(pairs, tokens_per_batch=24, seed=0, buckets=(8,))
    (batch,) = batches.one_pass()
    source, target = pairs.source_ids, pairs.target_ids
    np.testing.assert_array_equal(
        batch.encoder_input_tokens,
        [[*source[:3], *[0] * 5], [*source[3:], *[0] * 3], [0] * 8],
    )
    np.testing.assert_array_equal(
        batch.decoder_target_tokens,
        [[*target[:2], *[0] * 6], [*target[2:], *[0] * 4], [0] * 8],
    )
    np.testing.assert_array_equal(
        batch.decoder_input_tokens[:, 1:], batch.decoder_target_tokens[:, :-1]
    )
    assert not batch.decoder_input_tokens[:, 0].any()
    assert (batch.num_pairs, batch.num_tokens) == (2, 6)


def test_one_pass_gives_every_pair_once():
    batches = make_batches(number=101)
    seen = [token for batch in batches.one_pass() for token in first_tokens(batch)]
    assert sorted(seen) == list(range(3, 104))


def test_an_epoch_repeats_no_pair_and_later_epochs_give_the_rest():
    batches = make_batches(number=101)
    per_epoch = batches.batches_per_epoch
    stream, seen = batches.batches(), set()
    for _ in range(10):
        epoch = [
            token for batch in itertools.islice(stream, per_epoch) for token in first_tokens(batch)
        ]
        assert len(epoch) == len(set(epoch)) > 101 - 16 - 8 - 4
        seen |= set(epoch)
    assert seen == set(range(3, 104))


def test_a_bucket_smaller_than_a_batch_is_padded():
    batches = Batches(make_pairs([(5, 5)] * 3), tokens_per_batch=80, seed=0)
    assert batches.batches_per_epoch == 1
    batch = next(batches.batches())
    assert batch.decoder_target_tokens.shape == (6, 12)
    assert batch.num_pairs == 3


@pytest.mark.parametrize("start", [0, 26, 1000])
def test_resuming_gives_the_same_batches(start):
    undisturbed = itertools.islice(make_batches().batches(), start, start + 30)
    resumed = make_batches().batches(start)
    for expected, batch in zip(undisturbed, resumed, strict=False):
        assert_same(expected, batch)


def test_order_depends_on_seed_and_epoch():
    batches = make_batches()
    per_epoch = batches.batches_per_epoch
    orders = [
        [first_tokens(b) for b in itertools.islice(stream, 10)]
        for stream in (
            batches.batches(),
            batches.batches(per_epoch),
            make_batches(seed=1).batches(),
        )
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


TEXTS = [("abc", "ab"), ("x" * 10, "y"), ("", "empty"), ("ä", "b")]


def tokenised(texts=TEXTS, limits=(10, 10), **options):
    return tokenise(texts, ByteVocabulary(), limits, **options)


def test_tokenising_appends_eos_and_drops_long_and_empty_pairs():
    pairs = tokenised()
    assert (len(pairs), pairs.num_dropped) == (2, 2)
    assert pairs.source_ids.tolist() == [100, 101, 102, 1, 198, 167, 1]
    assert pairs.source_lengths.tolist() == [4, 3]
    assert pairs.target_ids.tolist() == [100, 101, 1, 101, 1]
    assert pairs.target_lengths.tolist() == [3, 2]
    with pytest.raises(InputError, match="texts: all 4 are empty or longer"):
        tokenised(limits=(1, 10))


def test_tokenised_pairs_are_kept_until_something_changes(tmp_path):
    file, cache = tmp_path / "pairs.tsv", tmp_path / "cache"
    file.write_text("what the pairs are read from")
    kept = {"files": [file], "cache_dir": cache}
    first = tokenised(**kept)
    # Nothing is read again.
    again = tokenised((), **kept)
    np.testing.assert_array_equal(first.source_ids, again.source_ids)
    assert again.num_dropped == 2
    assert len(tokenised(limits=(11, 10), **kept)) == 3
    assert len(tokenised(TEXTS[:1], key="first", **kept)) == 1
    file.write_text("others")
    assert len(tokenised(TEXTS[3:], **kept)) == 1
    assert len(list(cache.iterdir())) == 4


def test_lines_are_pairs_without_a_source():
    lines = [(None, text) for text in ("abc", "x", "longer than that", "")]
    pairs = tokenised(lines, limits=(0, 6))
    assert (len(pairs), pairs.num_dropped) == (2, 2)
    (batch,) = Batches(pairs, tokens_per_batch=8, seed=0, buckets=(4, 8)).one_pass()
    assert batch.decoder_target_tokens.tolist() == [[100, 101, 102, 1], [123, 1, 0, 0]]
    assert batch.decoder_input_tokens.tolist() == [[0, 100, 101, 102], [0, 123, 1, 0]]
    assert batch.encoder_input_tokens.shape == (2, 0)
    assert (batch.num_tokens, batch.num_pairs) == (6, 2)


def test_the_shorter_side_is_padded_no_further_than_it_needs():
    pairs = make_pairs([(30, 5), (25, 3), (6, 7)])
    batches = Batches(pairs, tokens_per_batch=64, seed=0, buckets=(8, 16, 32))
    shapes = {
        (b.encoder_input_tokens.shape, b.decoder_target_tokens.shape) for b in batches.one_pass()
    }
    # The longer side still decides how many rows there are.
    assert shapes == {((2, 32), (2, 8)), ((8, 8), (8, 8))}


def test_long_sources_can_be_cut_instead_of_dropped():
    texts, limits = [("abcdefgh", "xy"), ("ab", "abcdefgh"), ("ab", "c")], (5, 5)
    dropped, cut = tokenised(texts, limits), tokenised(texts, limits, truncate_sources=True)
    assert (len(dropped), dropped.num_dropped) == (1, 2)
    # A target is never cut: what the text says would change.
    assert (len(cut), cut.num_dropped) == (2, 1)
    assert cut.source_lengths.tolist() == [5, 3]
    assert cut.source_ids[:5].tolist() == [*(3 + ord(c) for c in "abcd"), 1]


def test_a_cache_that_finds_no_room(tmp_path, disk):
    pairs, cache = make_pairs([(20, 20)] * 100), tmp_path / "cache" / "pairs.npz"
    disk.fill()
    message = f"cannot write {cache}: File too large: free some space and run"
    with pytest.raises(InputError, match=message):
        batching.store_tokenised(cache, pairs)
    disk.clear()
    assert not list(cache.parent.iterdir())
    batching.store_tokenised(cache, pairs)
    assert list(cache.parent.iterdir()) == [cache]
