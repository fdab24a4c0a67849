"""Packed batches: every pair once, apart from its neighbours, in an order that can be resumed."""

import itertools

import jax
import numpy as np
import pytest

from spec_t5x.labs.training.batching import Batches, join_pairs
from spec_t5x.labs.training.interfaces import TrainOptions, model_inputs
from spec_t5x.labs.training.learners import Network
from spec_t5x.labs.training.packing import PackedBatches
from tests.labs.training.toys import toy_config

LENGTHS = (24, 16)


def make_pairs(number=60):
    rng = np.random.default_rng(0)

    def text(longest):
        return [*rng.integers(3, 50, rng.integers(1, longest)).tolist(), 1]

    return join_pairs((text(LENGTHS[0] - 1), text(LENGTHS[1] - 1)) for _ in range(number))


def packed(pairs, seed=0):
    return PackedBatches(pairs, lengths=LENGTHS, tokens_per_batch=100, seed=seed)


def texts(batch):
    """Returns the (source, target) of each pair of a batch."""
    found = []
    for *ids, of_source, of_target in zip(
        batch.encoder_input_tokens, batch.decoder_target_tokens, *batch.segment_ids, strict=True
    ):
        for number in range(1, of_source.max() + 1):
            sides = zip(ids, (of_source, of_target), strict=True)
            found.append(tuple(tuple(side[which == number].tolist()) for side, which in sides))
    return found


def test_arrays_of_a_row():
    pairs = join_pairs([([7, 8, 1], [9, 1])] * 2)
    batches = PackedBatches(pairs, lengths=(8, 5), tokens_per_batch=8, seed=0)
    (batch,) = batches.one_pass()
    assert batch.encoder_input_tokens.tolist() == [[7, 8, 1, 7, 8, 1, 0, 0]]
    assert batch.decoder_target_tokens.tolist() == [[9, 1, 9, 1, 0]]
    assert batch.decoder_input_tokens.tolist() == [[0, 9, 0, 9, 0]]
    segments = [[1, 1, 1, 2, 2, 2, 0, 0]], [[1, 1, 2, 2, 0]]
    assert tuple(each.tolist() for each in batch.segment_ids) == segments
    assert (batch.num_pairs, batch.num_tokens) == (2, 4)
    # Two pairs fill a row of their lengths, and no shorter one.
    for lengths, num_rows in (((6, 4), 1), ((5, 4), 2), ((6, 3), 2)):
        found = PackedBatches(pairs, lengths=lengths, tokens_per_batch=64, seed=0).one_pass()
        segments = [each.segment_ids[0].max(axis=1) for each in found]
        assert np.count_nonzero(np.concatenate(segments)) == num_rows


def test_one_pass_gives_every_pair_once():
    pairs = make_pairs()
    found = [pair for batch in packed(pairs).one_pass() for pair in texts(batch)]
    sides = pairs.source.split(), pairs.target.split()
    assert sorted(found) == sorted(
        tuple(tuple(side.tolist()) for side in pair) for pair in zip(*sides, strict=True)
    )


@pytest.mark.parametrize("start", [0, 3, 25])
def test_resuming_gives_the_same_batches(start):
    pairs = make_pairs()
    whole = itertools.islice(packed(pairs).batches(), start, start + 9)
    for expected, found in zip(whole, packed(pairs).batches(start), strict=False):
        assert texts(found) == texts(expected)


def test_another_seed_is_another_order():
    pairs = make_pairs()
    assert packed(pairs, seed=1).fingerprint != packed(pairs).fingerprint
    assert texts(next(packed(pairs, seed=1).batches())) != texts(next(packed(pairs).batches()))


def test_a_packed_pair_has_the_loss_of_a_pair_alone():
    pairs = make_pairs(20)
    config = toy_config(50, 16, num_encoder_layers=2, num_decoder_layers=2)
    learner = Network(config, TrainOptions(steps=1))
    params = learner.init(jax.random.key(0))

    def total(batches):
        found = [learner.loss(params, model_inputs(each), None) for each in batches.one_pass()]
        return np.sum([(each.cross_entropy, each.num_tokens) for each in found], axis=0)

    alone = Batches(pairs, tokens_per_batch=100, seed=0, buckets=(24,))
    np.testing.assert_allclose(total(packed(pairs)), total(alone), rtol=1e-5)
