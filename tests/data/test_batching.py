"""Batches: every pair, the right shapes, and an order that can be resumed."""

import itertools

import numpy as np
import pytest

from spec_t5x.data import batching
from spec_t5x.data.batching import Batches, TokenisedPairs, tokenise_file
from spec_t5x.data.vocabulary import ByteVocabulary
from spec_t5x.errors import InputError

COLUMNS = {"source_column": 0, "target_column": 1, "num_columns": 2}


def make_pairs(lengths, seed=0):
    """Pairs of random tokens; source i starts with token 3 + i, so it can be told."""
    rng = np.random.default_rng(seed)

    def make(lengths, first):
        rows = [rng.integers(3, 500, n) for n in lengths]
        for i, row in enumerate(rows):
            row[-1] = 1
            if first:
                row[0] = 3 + i
        return np.concatenate(rows).astype(np.int32), np.cumsum(lengths)

    source_ids, source_ends = make([source for source, _ in lengths], True)
    target_ids, target_ends = make([target for _, target in lengths], False)
    return TokenisedPairs(
        source_ids=source_ids,
        source_ends=source_ends,
        target_ids=target_ids,
        target_ends=target_ends,
        num_dropped=0,
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


@pytest.fixture
def tsv(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("abc\tab\n" + "x" * 10 + "\ty\n" + "\tempty\n" + "ä\tb\n")
    return path


def tokenise(tsv, cache_dir, **limits):
    limits = {"max_source_length": 10, "max_target_length": 10} | limits
    return tokenise_file(tsv, ByteVocabulary(), **COLUMNS, **limits, cache_dir=cache_dir)


def test_tokenising_appends_eos_and_drops_long_and_empty_pairs(tsv):
    pairs = tokenise(tsv, None)
    assert (len(pairs), pairs.num_dropped) == (2, 2)
    assert pairs.source_ids.tolist() == [100, 101, 102, 1, 198, 167, 1]
    assert pairs.source_lengths.tolist() == [4, 3]
    assert pairs.target_ids.tolist() == [100, 101, 1, 101, 1]
    assert pairs.target_lengths.tolist() == [3, 2]


def test_tokenised_pairs_are_kept_until_something_changes(tsv, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = tokenise(tsv, cache)
    monkeypatch.setattr(batching, "read_pairs", None)  # must not be called again
    again = tokenise(tsv, cache)
    np.testing.assert_array_equal(first.source_ids, again.source_ids)
    assert again.num_dropped == 2
    monkeypatch.undo()
    assert len(tokenise(tsv, cache, max_source_length=11)) == 3
    tsv.write_text("other\ttext\n")
    assert len(tokenise(tsv, cache)) == 1
    assert len(list(cache.iterdir())) == 3


def test_nothing_left(tsv):
    with pytest.raises(InputError, match="pairs.tsv: all 4 are empty or longer"):
        tokenise(tsv, None, max_source_length=1)


def test_a_prefix_comes_before_every_source_but_empty_ones(tsv, tmp_path):
    plain = tokenise(tsv, tmp_path)
    pairs = tokenise(tsv, tmp_path, source_prefix="x ", max_source_length=12)
    assert (len(pairs), pairs.num_dropped) == (2, 2)
    assert pairs.source_ids[:6].tolist() == [123, 35, *plain.source_ids[:4]]
    np.testing.assert_array_equal(pairs.target_ids, plain.target_ids)


def test_the_shorter_side_is_padded_no_further_than_it_needs():
    pairs = make_pairs([(30, 5), (25, 3), (6, 7)])
    batches = Batches(pairs, tokens_per_batch=64, seed=0, buckets=(8, 16, 32))
    shapes = {
        (b.encoder_input_tokens.shape, b.decoder_target_tokens.shape) for b in batches.one_pass()
    }
    # The longer side still decides how many rows there are.
    assert shapes == {((2, 32), (2, 8)), ((8, 8), (8, 8))}


def test_long_sources_can_be_cut_instead_of_dropped(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("abcdefgh\txy\nab\tabcdefgh\nab\tc\n")
    limits = {"max_source_length": 5, "max_target_length": 5, "cache_dir": tmp_path / "cache"}
    dropped = tokenise_file(path, ByteVocabulary(), **COLUMNS, **limits)
    cut = tokenise_file(path, ByteVocabulary(), **COLUMNS, **limits, truncate_sources=True)
    assert (len(dropped), dropped.num_dropped) == (1, 2)
    # A target is never cut: what the text says would change.
    assert (len(cut), cut.num_dropped) == (2, 1)
    assert cut.source_lengths.tolist() == [5, 3]
    assert cut.source_ids[:5].tolist() == [*(3 + ord(c) for c in "abcd"), 1]


def test_a_cache_that_finds_no_room(tmp_path, disk):
    pairs, cache = make_pairs([(20, 20)] * 100), tmp_path / "cache" / "pairs.npz"
    disk.fill()
    message = f"cannot be kept in {cache.parent}: File too large: free some space or"
    with pytest.raises(InputError, match=message):
        batching.store_tokenised(cache, pairs)
    disk.clear()
    assert not list(cache.parent.iterdir())
    batching.store_tokenised(cache, pairs)
    assert list(cache.parent.iterdir()) == [cache]
