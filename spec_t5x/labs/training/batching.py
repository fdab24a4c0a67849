"""Length-bucketed batches whose order is a function of (seed, step) alone.

A bucket is a pair of padded lengths, in tokens, of sources and of targets; XLA compiles one program
for each bucket. The shuffle of an epoch follows from (seed, epoch), and all epochs have equally
many batches: resuming at step N costs one shuffle.
"""

import array
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError, check_numbers
from spec_t5x.types import EOS_ID, PAD_ID

DEFAULT_BUCKETS = (12, 16, 24, 32, 48, 64, 96, 128)

# Token ids of one text: a list, or an array of a seqio stream.
Ids = Sequence[int] | Int[np.ndarray, "_"]
# Number of batches from which a pair of lengths is worth a program, whose compilation takes as long
# as some tens of steps.
_BATCHES_OF_A_SHAPE = 50
_TOKENISE_CHUNK = 20_000  # pairs for each call of the tokeniser
_FINGERPRINT_NAME = "batches.sha256"  # the file that save_position writes


@dataclasses.dataclass(frozen=True)
class Texts:
    """Concatenated id sequences: text i is ``ids[ends[i - 1]:ends[i]]`` (from 0 for i = 0)."""

    ids: np.ndarray  # [total tokens] int32
    ends: np.ndarray  # [texts] int64

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text, EOS included, [texts]."""
        return np.diff(self.ends, prepend=0)

    def __getitem__(self, index: int | np.integer) -> np.ndarray:
        """Returns the ids of a text, a view."""
        return self.ids[self.ends[index - 1] if index else 0 : self.ends[index]]

    def split(self) -> list[np.ndarray]:
        """Returns the ids of each text."""
        return np.split(self.ids, self.ends[:-1])

    def first(self, number: int) -> "Texts":
        """Returns the first ``number`` texts, or all if there are fewer."""
        return Texts(self.ids[: self.lengths[:number].sum()], self.ends[:number])

    def padded(self, indices: np.ndarray, rows: int, length: int) -> np.ndarray:
        """Returns the texts of ``indices``, padded to [rows, length]; other rows are padding."""
        padded = np.full((rows, length), PAD_ID, np.int32)
        for row, i in enumerate(indices):
            text = self[i]
            padded[row, : len(text)] = text
        return padded


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenisedPairs:
    """Token ids of (source, target) pairs, each text ending in EOS, in the order read."""

    source: Texts
    target: Texts
    num_dropped: int  # pairs longer than the limits, or with an empty side

    def __len__(self) -> int:
        return len(self.source.ends)

    def first(self, number: int) -> "TokenisedPairs":
        """Returns the first ``number`` pairs, or all if there are fewer."""
        sides = {"source": self.source.first(number), "target": self.target.first(number)}
        return dataclasses.replace(self, **sides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairBatch:
    """A batch of padded ids; rows past the last pair and positions past EOS hold padding."""

    encoder_input_tokens: np.ndarray  # [batch, source] int32
    decoder_input_tokens: np.ndarray  # [batch, length] int32, shifted right
    decoder_target_tokens: np.ndarray  # [batch, length] int32
    num_pairs: int  # rows that hold a pair; of packed rows, the pairs of all
    # For packed rows, the pair of each source and target token, from 1 in each row; 0 is padding.
    segment_ids: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of target tokens, padding excluded."""
        return int(np.count_nonzero(self.decoder_target_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """The shape of a bucket's batches, and the pairs that belong to the bucket."""

    source: int  # padded source length; 0 where no pair has a source
    target: int  # padded target length
    batch_size: int  # rows
    pairs: np.ndarray  # [pairs of this bucket] indices, increasing


def tokenise(
    texts: Iterable[tuple[str | None, str]],
    vocabulary: Vocabulary,
    limits: tuple[int, int],
    *,
    truncate_sources: bool = False,
    name: str = "texts",
) -> TokenisedPairs:
    """Encodes (source, target) texts to ids, each ending in EOS; sources may all be None.

    Pairs longer than ``limits`` (tokens of source and target, EOS included) or with an empty side
    are dropped and counted; ``truncate_sources`` cuts longer sources instead, as T5 does.

    Raises:
        InputError: no pair is left; the message begins with ``name``.
    """
    pairs = join_pairs(_encoded(iter(texts), vocabulary, limits, truncate_sources))
    if not len(pairs):
        raise InputError(
            f"{name}: all {pairs.num_dropped} pairs are empty or longer than {limits[1]} tokens "
            f"(sources {limits[0]}): raise the limits"
        )
    return pairs


def _encoded(
    texts: Iterator[tuple[str | None, str]],
    vocabulary: Vocabulary,
    limits: tuple[int, int],
    truncate_sources: bool,
) -> Iterator[tuple[Ids, Ids] | None]:
    """Yields the ids of each pair, or None if the pair exceeds a limit or has an empty side."""
    longest = limits[0] - len(vocabulary.framed([]))
    while chunk := list(itertools.islice(texts, _TOKENISE_CHUNK)):
        sources, targets = zip(*chunk, strict=True)
        has_sources = sources[0] is not None
        sources = vocabulary.encode_batch(sources) if has_sources else sources
        for source, target in zip(sources, vocabulary.encode_batch(targets), strict=True):
            if has_sources and truncate_sources:
                source = source[:longest]
            fits = not has_sources or 0 < len(source) <= longest
            if fits and 0 < len(target) < limits[1]:
                yield vocabulary.framed(source) if has_sources else [], [*target, EOS_ID]
            else:
                yield None


def join_pairs(pairs: Iterable[tuple[Ids, Ids] | None]) -> TokenisedPairs:
    """Concatenates (source ids, target ids) pairs; each None is counted as a dropped pair."""
    # C arrays, because lists of a corpus's millions of pairs would take several times the memory.
    ids, ends = (array.array("i"), array.array("i")), (array.array("q"), array.array("q"))
    num_dropped = 0
    for pair in pairs:
        if pair is None:
            num_dropped += 1
            continue
        for side, sequence in enumerate(pair):
            ids[side].extend(sequence)
            ends[side].append(len(ids[side]))
    source, target = (
        Texts(np.array(each, np.int32), np.array(its_ends, np.int64))
        for each, its_ends in zip(ids, ends, strict=True)
    )
    return TokenisedPairs(source=source, target=target, num_dropped=num_dropped)


class Batches:
    """The batches of tokenised pairs, in a reproducible order.

    Each epoch shuffles each bucket's pairs and cuts them into full batches; the remaining pairs are
    left out of the epoch. A bucket with fewer pairs than a batch has rows gives one batch with
    padding rows. The batches of all buckets are then shuffled together.
    """

    def __init__(
        self,
        pairs: TokenisedPairs,
        *,
        tokens_per_batch: int,
        seed: int,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
    ):
        """Groups the pairs by the smallest lengths of ``buckets`` that hold source and target.

        A batch has ``max(1, tokens_per_batch // L)`` rows, where L is the longer of both lengths.
        Pairs that fill few batches are grouped by their longer side alone, because XLA compiles a
        program for each group. Each side is padded to the smallest of the lengths that holds this
        side of all the group's pairs.

        Raises:
            InputError: a pair fits no bucket, or tokens_per_batch < 1.
        """
        check_numbers(1, tokens_per_batch=tokens_per_batch)
        self._pairs = pairs
        self._seed = seed
        self.buckets = _assign_buckets(pairs, sorted(set(buckets)), tokens_per_batch)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of every epoch."""
        return sum(max(1, len(b.pairs) // b.batch_size) for b in self.buckets)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the seed, the buckets and the pairs' ids, which determine batch N."""
        digest = hashlib.sha256(str(self._seed).encode())
        for bucket in self.buckets:
            digest.update(f" {bucket.source} {bucket.target} {bucket.batch_size}".encode())
            digest.update(bucket.pairs.tobytes())
        for texts in (self._pairs.source, self._pairs.target):
            digest.update(np.ascontiguousarray(texts.ids).data)
            digest.update(np.ascontiguousarray(texts.ends).data)
        return digest.hexdigest()

    def save_position(self, directory: Path) -> None:
        """Writes the fingerprint to ``directory``; the position itself is the checkpoint's step."""
        (directory / _FINGERPRINT_NAME).write_text(self.fingerprint)

    def batches(self, start_step: int = 0, position: Path | None = None) -> Iterator[PairBatch]:
        """Yields batch ``start_step``, ``start_step + 1``, ... without end.

        Raises:
            InputError: ``position``, where ``save_position`` wrote, has another fingerprint.
        """
        # Before step 0 no batch was read: a run that found no memory for one takes smaller ones.
        file = position and start_step and position / _FINGERPRINT_NAME
        if file and not (file.exists() and file.read_text() == self.fingerprint):
            raise InputError(
                f"the checkpoint of step {start_step} is of other pairs, another seed or batches "
                "of another size: give another output directory, or the data that it was trained on"
            )
        # A nested generator, so that the check above runs at the call.
        return self._from(start_step)

    def _from(self, start_step: int) -> Iterator[PairBatch]:
        first, offset = divmod(start_step, self.batches_per_epoch)
        for epoch in itertools.count(first):
            for bucket, indices in self._epoch_plan(epoch)[offset:]:
                yield self._batch(bucket, indices)
            offset = 0

    def one_pass(self) -> Iterator[PairBatch]:
        """Yields every pair once, unshuffled; a bucket's last batch may have padding rows."""
        for bucket in self.buckets:
            for start in range(0, len(bucket.pairs), bucket.batch_size):
                yield self._batch(bucket, bucket.pairs[start : start + bucket.batch_size])

    def _epoch_plan(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        rng = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        plan = []
        for bucket in self.buckets:
            shuffled = rng.permutation(bucket.pairs)
            for i in range(max(1, len(shuffled) // bucket.batch_size)):
                start = i * bucket.batch_size
                plan.append((bucket, shuffled[start : start + bucket.batch_size]))
        return [plan[i] for i in rng.permutation(len(plan))]

    def _batch(self, bucket: Bucket, indices: np.ndarray) -> PairBatch:
        rows = bucket.batch_size
        source = self._pairs.source.padded(indices, rows, bucket.source)
        target = self._pairs.target.padded(indices, rows, bucket.target)
        return batch_of(source, target, num_pairs=len(indices))


def _assign_buckets(
    pairs: TokenisedPairs, lengths: Sequence[int], tokens_per_batch: int
) -> list[Bucket]:
    sides = pairs.source.lengths, pairs.target.lengths
    longest = np.maximum(*sides)
    if longest.max(initial=0) > lengths[-1]:
        raise InputError(
            f"a pair has {longest.max()} tokens, the largest bucket {lengths[-1]}: "
            "add a bucket or lower the maximum lengths"
        )
    padded, buckets = np.array([0, *lengths]), []
    # The smallest padded length of each side, [pairs, 2].
    shapes = np.searchsorted(padded, np.stack(sides, axis=1))
    found, which, counts = np.unique(shapes, axis=0, return_inverse=True, return_counts=True)

    def rows(shape: Int[np.ndarray, "2"]) -> int:
        return max(1, tokens_per_batch // int(padded[shape.max()]))

    least = np.array([_BATCHES_OF_A_SHAPE * rows(shape) for shape in found])
    is_rare = (counts < least)[which.ravel(), None]
    shapes = np.where(is_rare, shapes.max(axis=1, keepdims=True), shapes)
    for shape in np.unique(shapes, axis=0):
        members = np.flatnonzero((shapes == shape).all(axis=1))
        source, target = (int(padded[np.searchsorted(padded, s[members].max())]) for s in sides)
        buckets.append(Bucket(source=source, target=target, batch_size=rows(shape), pairs=members))
    return buckets


def batch_of(source: np.ndarray, target: np.ndarray, *, num_pairs: int) -> PairBatch:
    """Makes a batch of padded ids: ``source``, [batch, source], ``target``, [batch, length]."""
    shifted = np.full_like(target, PAD_ID)
    shifted[:, 1:] = target[:, :-1]
    return PairBatch(
        encoder_input_tokens=source,
        decoder_input_tokens=shifted,
        decoder_target_tokens=target,
        num_pairs=num_pairs,
    )
