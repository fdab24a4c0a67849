"""Batches of rows that hold several pairs each, as T5X packs examples.

Segment ids keep the pairs of a row apart: a token attends only to tokens of the same pair, so that
each pair has the loss that it has alone in a row. XLA compiles one program for all lengths.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec_t5x.errors import check_numbers
from spec_t5x.labs.training.batching import (
    Batches,
    Bucket,
    PairBatch,
    Texts,
    TokenisedPairs,
    batch_of,
)
from spec_t5x.types import PAD_ID


class PackedBatches(Batches):
    """Batches of packed pairs; the rows of an epoch are the same, in another order."""

    def __init__(
        self, pairs: TokenisedPairs, *, lengths: tuple[int, int], tokens_per_batch: int, seed: int
    ):
        """Packs the pairs, in an order drawn with ``seed``.

        Args:
          pairs: each must fit ``lengths``.
          lengths: tokens of a row, of sources and of targets.
          tokens_per_batch: a batch has ``tokens_per_batch // max(lengths)`` rows, at least one.

        Raises:
            InputError: tokens_per_batch < 1.
        """
        check_numbers(1, tokens_per_batch=tokens_per_batch)
        self._pairs, self._seed = pairs, seed
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(pairs))
        sides = pairs.source.lengths[order], pairs.target.lengths[order]
        self._rows = np.split(order, _starts(*(side.tolist() for side in sides), lengths))
        rows = max(1, tokens_per_batch // max(lengths))
        numbers = np.arange(len(self._rows))
        shape = {"source": lengths[0], "target": lengths[1], "batch_size": rows}
        self.buckets = [Bucket(**shape, pairs=numbers)]

    def _batch(self, bucket: Bucket, indices: np.ndarray) -> PairBatch:
        rows = [self._rows[i] for i in indices]
        source, of_source = _packed(self._pairs.source, rows, bucket.batch_size, bucket.source)
        target, of_target = _packed(self._pairs.target, rows, bucket.batch_size, bucket.target)
        batch = batch_of(source, target, num_pairs=sum(map(len, rows)))
        # The first token of each pair follows the start token, not the pair before it.
        is_first = np.diff(of_target, axis=1, prepend=0) != 0
        shifted = np.where(is_first, PAD_ID, batch.decoder_input_tokens)
        segment_ids = of_source, of_target
        return dataclasses.replace(batch, decoder_input_tokens=shifted, segment_ids=segment_ids)


def _starts(sources: Sequence[int], targets: Sequence[int], lengths: tuple[int, int]) -> list[int]:
    """Returns the numbers of the pairs that no longer fit a row, and so begin the next one."""
    starts, used = [], [0, 0]
    for number, pair in enumerate(zip(sources, targets, strict=True)):
        used = [used[0] + pair[0], used[1] + pair[1]]
        if used[0] > lengths[0] or used[1] > lengths[1]:
            starts.append(number)
            used = list(pair)
    return starts


def _packed(
    texts: Texts, rows: Sequence[np.ndarray], batch_size: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and segment ids, counted from 1 in each row, [batch_size, length]."""
    ids = np.full((batch_size, length), PAD_ID, np.int32)
    segments = np.zeros((batch_size, length), np.int32)
    for row, members in enumerate(rows):
        parts = [texts[i] for i in members]
        packed = np.concatenate(parts)
        ids[row, : len(packed)] = packed
        numbers = np.arange(1, len(parts) + 1)
        segments[row, : len(packed)] = np.repeat(numbers, [len(part) for part in parts])
    return ids, segments
