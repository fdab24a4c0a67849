"""Length-bucketed batches whose order is a function of (seed, step) alone.

A file is tokenised once and kept as four flat arrays. Every pair belongs to the
smallest bucket that holds it; XLA compiles one program for each bucket. The
shuffle of an epoch follows from (seed, epoch), and every epoch has the same
number of batches, so that training resumed at step N gets batch N at the cost
of one shuffle.
"""

import dataclasses
import functools
import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from spec_t5x.data.tsv import read_pairs
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.types import EOS_ID, PAD_ID

DEFAULT_BUCKETS = (12, 16, 24, 32, 48, 64, 96, 128)

# Bump when the arrays of a stored file change their meaning.
CACHE_FORMAT = 1
_TOKENISE_CHUNK = 20_000  # texts handed to the tokeniser at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenisedPairs:
    """Pairs of id sequences, each ending in EOS, in the file's order.

    Pair i is ``source_ids[source_ends[i - 1]:source_ends[i]]`` (from 0 for i = 0),
    and likewise for the target.
    """

    source_ids: np.ndarray  # [total source tokens] int32
    source_ends: np.ndarray  # [pairs] int64
    target_ids: np.ndarray  # [total target tokens] int32
    target_ends: np.ndarray  # [pairs] int64
    num_dropped: int  # pairs longer than the limits, or with an empty side

    def __len__(self) -> int:
        return len(self.source_ends)

    def first(self, number: int) -> "TokenisedPairs":
        """The first so many pairs, or all where there are fewer."""
        return dataclasses.replace(
            self,
            source_ids=self.source_ids[: self.source_lengths[:number].sum()],
            source_ends=self.source_ends[:number],
            target_ids=self.target_ids[: self.target_lengths[:number].sum()],
            target_ends=self.target_ends[:number],
        )

    @property
    def source_lengths(self) -> np.ndarray:
        """Tokens of every source, EOS included, [pairs]."""
        return np.diff(self.source_ends, prepend=0)

    @property
    def target_lengths(self) -> np.ndarray:
        """Tokens of every target, EOS included, [pairs]."""
        return np.diff(self.target_ends, prepend=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch; rows past the last pair and positions past EOS hold padding."""

    encoder_input_tokens: np.ndarray  # [batch, source] int32
    decoder_input_tokens: np.ndarray  # [batch, length] int32, shifted right
    decoder_target_tokens: np.ndarray  # [batch, length] int32
    num_pairs: int  # rows that hold a pair

    @property
    def num_tokens(self) -> int:
        """Target tokens, padding excluded."""
        return int(np.count_nonzero(self.decoder_target_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """A batch shape and the pairs that use it."""

    source: int  # padded source length; 0 where no pair has a source
    target: int  # padded target length
    batch_size: int  # rows
    pairs: np.ndarray  # [pairs of this bucket] indices, increasing


def tokenise_file(
    path: str | Path,
    vocabulary: Vocabulary,
    *,
    source_column: int | None = None,
    target_column: int | None = None,
    num_columns: int | None = None,
    max_source_length: int,
    max_target_length: int,
    cache_dir: str | Path | None,
    source_prefix: str = "",
    truncate_sources: bool = False,
) -> TokenisedPairs:
    """Tokenises the pairs of a file, or loads them from an earlier call.

    Args:
        path: a tab-separated file, see ``tsv.read_pairs``.
        vocabulary: encodes both sides; EOS is appended to each.
        source_column, target_column, num_columns: see ``tsv.read_pairs``.
        max_source_length, max_target_length: in tokens, EOS included; longer pairs
            are dropped and counted.
        cache_dir: where to keep the arrays, named by a hash of the file's content,
            the vocabulary and the other arguments; None keeps nothing.
        source_prefix: put before every source that is not empty.
        truncate_sources: cut longer sources, as T5 does, instead of dropping their pairs.

    Raises:
        InputError: the file cannot be read, or no pair is left.
    """
    options = (source_column, target_column, num_columns)
    limits = (max_source_length, max_target_length)
    if cache_dir is not None and Path(path).is_file():
        prefixed = (*options, source_prefix) if source_prefix else options
        prefixed = (*prefixed, "truncated") if truncate_sources else prefixed
        key = _cache_key(path, vocabulary, prefixed, limits)
        cache = Path(cache_dir) / f"pairs-{key}.npz"
        if cache.is_file():
            return load_tokenised(cache)
    texts = read_pairs(path, *options)
    if source_prefix:
        texts = ((source and source_prefix + source, target) for source, target in texts)
    pairs = _tokenise(texts, vocabulary, *limits, truncate_sources)
    if not len(pairs):
        raise InputError(
            f"{path}: all {pairs.num_dropped} pairs are empty or longer than "
            f"{max_source_length}/{max_target_length} tokens: raise the limits"
        )
    if cache_dir is not None:
        store_tokenised(cache, pairs)
    return pairs


def _tokenise(
    texts: Iterator[tuple[str, str]],
    vocabulary: Vocabulary,
    max_source_length: int,
    max_target_length: int,
    truncate_sources: bool,
) -> TokenisedPairs:
    pairs, num_dropped = [], 0
    threads = os.cpu_count() or 1
    while chunk := list(itertools.islice(texts, _TOKENISE_CHUNK)):
        source_chunk = vocabulary.encode_batch([pair[0] for pair in chunk], threads)
        target_chunk = vocabulary.encode_batch([pair[1] for pair in chunk], threads)
        for source, target in zip(source_chunk, target_chunk, strict=True):
            if truncate_sources:
                source = source[: max_source_length - 1]
            fits = len(source) < max_source_length and len(target) < max_target_length
            if fits and source and target:
                pairs.append(
                    (np.array([*source, EOS_ID], np.int32), np.array([*target, EOS_ID], np.int32))
                )
            else:
                num_dropped += 1
    return join_pairs(pairs, num_dropped)


def _cache_key(path, vocabulary, options, limits) -> str:
    digest = hashlib.sha256()
    add_file(digest, path)
    segmentation = vocabulary.segmentation_fingerprint()
    digest.update(repr((CACHE_FORMAT, segmentation, options, limits)).encode())
    return digest.hexdigest()[:24]


def add_file(digest, path: str | Path) -> None:
    """Adds a file's content to a ``hashlib`` digest."""
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)


def store_tokenised(cache: Path, pairs: TokenisedPairs) -> None:
    """Keeps the arrays in a file, which appears whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed, so that a kill leaves no half file under the name.
        descriptor, temporary = tempfile.mkstemp(dir=cache.parent, suffix=".npz")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                np.savez(stream, **dataclasses.asdict(pairs))
            os.replace(temporary, cache)
        finally:
            # There still is what could not be written to its end.
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"tokenised texts cannot be kept in {cache.parent}: {error.strerror or error}: make "
            "room or give another directory, and run the command again"
        ) from error


def load_tokenised(cache: Path) -> TokenisedPairs:
    """What ``store_tokenised`` kept."""
    with np.load(cache) as arrays:
        fields = {name: arrays[name] for name in arrays.files}
    return TokenisedPairs(**fields | {"num_dropped": int(fields["num_dropped"])})


class Batches:
    """The batches of tokenised pairs, in a reproducible order.

    In an epoch each bucket's pairs are shuffled and cut into full batches; the
    remainder waits for the next epoch's shuffle, except that a bucket with less
    than one batch gives one that is filled with padding rows. The batches of all
    buckets are then shuffled.
    """

    def __init__(
        self,
        pairs: TokenisedPairs,
        *,
        tokens_per_batch: int,
        seed: int,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
    ):
        """Sorts the pairs into buckets.

        Args:
            pairs: what to batch.
            tokens_per_batch: padded tokens of a batch, of the longer side; a bucket of
                length L has ``max(1, tokens_per_batch // L)`` rows.
            seed: with the epoch, decides the order.
            buckets: padded lengths, increasing. The longer side of a pair decides which
                it is in; the other side is padded no further than its longest needs.

        Raises:
            InputError: a pair fits no bucket, or tokens_per_batch < 1.
        """
        if tokens_per_batch < 1:
            raise InputError(f"tokens_per_batch is {tokens_per_batch}: give 1 or more")
        self._pairs = pairs
        self._seed = seed
        self.buckets = _assign_buckets(pairs, sorted(set(buckets)), tokens_per_batch)

    @property
    def batches_per_epoch(self) -> int:
        """The same in every epoch."""
        return sum(max(1, len(b.pairs) // b.batch_size) for b in self.buckets)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of all that decides which pairs batch N has: 64 hexadecimal digits."""
        digest = hashlib.sha256(str(self._seed).encode())
        for bucket in self.buckets:
            digest.update(f" {bucket.source} {bucket.target} {bucket.batch_size}".encode())
            digest.update(bucket.pairs.tobytes())
        pairs = self._pairs
        for array in (pairs.source_ids, pairs.source_ends, pairs.target_ids, pairs.target_ends):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Yields batch ``start_step``, ``start_step + 1``, ... without end."""
        first, offset = divmod(start_step, self.batches_per_epoch)
        for epoch in itertools.count(first):
            for bucket, indices in self._epoch_plan(epoch)[offset:]:
                yield make_batch(self._pairs, bucket, indices)
            offset = 0

    def one_pass(self) -> Iterator[Batch]:
        """Yields every pair once, unshuffled; last batches have padding rows."""
        for bucket in self.buckets:
            for start in range(0, len(bucket.pairs), bucket.batch_size):
                indices = bucket.pairs[start : start + bucket.batch_size]
                yield make_batch(self._pairs, bucket, indices)

    def _epoch_plan(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        rng = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        plan = []
        for bucket in self.buckets:
            shuffled = rng.permutation(bucket.pairs)
            for i in range(max(1, len(shuffled) // bucket.batch_size)):
                start = i * bucket.batch_size
                plan.append((bucket, shuffled[start : start + bucket.batch_size]))
        return [plan[i] for i in rng.permutation(len(plan))]


def _assign_buckets(
    pairs: TokenisedPairs, lengths: Sequence[int], tokens_per_batch: int
) -> list[Bucket]:
    longest = np.maximum(pairs.source_lengths, pairs.target_lengths)
    if longest.max(initial=0) > lengths[-1]:
        raise InputError(
            f"a pair has {longest.max()} tokens, the largest bucket {lengths[-1]}: "
            "add a bucket or lower the maximum lengths"
        )
    which = np.searchsorted(lengths, longest)

    def bucket(length: int, members: np.ndarray) -> Bucket:
        return Bucket(
            source=_smallest(lengths, int(pairs.source_lengths[members].max())),
            target=_smallest(lengths, int(pairs.target_lengths[members].max())),
            batch_size=max(1, tokens_per_batch // length),
            pairs=members,
        )

    return [
        bucket(length, np.flatnonzero(which == i))
        for i, length in enumerate(lengths)
        if np.any(which == i)
    ]


def _smallest(lengths: Sequence[int], longest: int) -> int:
    """The smallest of the padded lengths that holds ``longest`` tokens; 0 for none."""
    if longest == 0:
        return 0
    return int(lengths[np.searchsorted(lengths, longest)])


def make_batch(pairs: TokenisedPairs, bucket: Bucket, indices: np.ndarray) -> Batch:
    """The pairs ``indices`` (at most ``bucket.batch_size``), padded to the bucket."""
    rows = bucket.batch_size
    source = _padded(pairs.source_ids, pairs.source_ends, indices, rows, bucket.source)
    target = _padded(pairs.target_ids, pairs.target_ends, indices, rows, bucket.target)
    return batch_of(source, target, num_pairs=len(indices))


def batch_of(source: np.ndarray, target: np.ndarray, *, num_pairs: int) -> Batch:
    """A batch of padded ids, [batch, source] and [batch, length]."""
    shifted = np.full_like(target, PAD_ID)
    shifted[:, 1:] = target[:, :-1]
    return Batch(
        encoder_input_tokens=source,
        decoder_input_tokens=shifted,
        decoder_target_tokens=target,
        num_pairs=num_pairs,
    )


def join_pairs(
    pairs: Iterable[tuple[np.ndarray, np.ndarray]], num_dropped: int = 0
) -> TokenisedPairs:
    """The pairs of id sequences, in their order."""
    pairs = list(pairs)
    empty = [np.zeros(0, np.int32)]
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    return TokenisedPairs(
        source_ids=np.concatenate(sources or empty),
        source_ends=np.cumsum([len(ids) for ids in sources], dtype=np.int64),
        target_ids=np.concatenate(targets or empty),
        target_ends=np.cumsum([len(ids) for ids in targets], dtype=np.int64),
        num_dropped=num_dropped,
    )


def _padded(
    ids: np.ndarray, ends: np.ndarray, indices: np.ndarray, rows: int, length: int
) -> np.ndarray:
    padded = np.full((rows, length), PAD_ID, np.int32)
    for row, i in enumerate(indices):
        sequence = ids[ends[i - 1] if i else 0 : ends[i]]
        padded[row, : len(sequence)] = sequence
    return padded
