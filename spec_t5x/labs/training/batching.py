"""Length-bucketed batches whose order is a function of (seed, step) alone.

A file is tokenised once and kept as four flat arrays. Every pair belongs to the
smallest bucket that holds it; XLA compiles one program for each bucket. The
shuffle of an epoch follows from (seed, epoch), and every epoch has the same
number of batches, so that training resumed at step N gets batch N at the cost
of one shuffle.
"""

import array
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError, check_numbers
from spec_t5x.machine.atomic import reported, whole_file
from spec_t5x.types import EOS_ID, PAD_ID

DEFAULT_BUCKETS = (12, 16, 24, 32, 48, 64, 96, 128)

# Bump when the arrays of a stored file change their meaning.
CACHE_FORMAT = 3
# Of one text; a stream of seqio has arrays.
Ids = Sequence[int] | Int[np.ndarray, "_"]
_TOKENISE_CHUNK = 20_000  # texts handed to the tokeniser at once
_FINGERPRINT_NAME = "batches.sha256"  # in the directory of a position


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
class PairBatch:
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


def tokenise(
    texts: Iterable[tuple[str | None, str]],
    vocabulary: Vocabulary,
    limits: tuple[int, int],
    *,
    truncate_sources: bool = False,
    files: Sequence[str | Path] = (),
    key: object = None,
    cache_dir: str | Path | None = None,
) -> TokenisedPairs:
    """The ids of ``(source, target)``, each ending in EOS, or what an earlier call kept of them.

    Args:
        texts: pairs, which are read where nothing is kept; sources may all be None, as for
            language models.
        vocabulary: encodes both sides.
        limits: tokens of source and target, EOS included; longer pairs are dropped and
            counted, and so are pairs with an empty side.
        truncate_sources: cut longer sources, as T5 does, instead of dropping their pairs.
        files, key: what the texts are read from, and what else decides them.
        cache_dir: where to keep the arrays; None keeps nothing.

    Raises:
        InputError: a file cannot be read, or no pair is left.
    """
    cache = None
    # The reader says what is wrong with a file that is absent.
    if cache_dir is not None and all(map(os.path.isfile, files)):
        decides = (CACHE_FORMAT, vocabulary.segmentation_fingerprint(), limits, truncate_sources)
        digest = hashlib.sha256(repr((*decides, key)).encode())
        for file in files:
            with open(file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        cache = Path(cache_dir) / f"texts-{digest.hexdigest()[:24]}.npz"
        if cache.is_file():
            return load_tokenised(cache)
    texts, num_dropped = iter(texts), 0
    longest = limits[0] - len(vocabulary.framed([]))

    def encoded() -> Iterator[tuple[list[int], list[int]]]:
        nonlocal num_dropped
        while chunk := list(itertools.islice(texts, _TOKENISE_CHUNK)):
            sources, targets = zip(*chunk, strict=True)
            has_sources = sources[0] is not None
            if has_sources:
                sources = vocabulary.encode_batch(sources)
            targets = vocabulary.encode_batch(targets)
            for source, target in zip(sources, targets, strict=True):
                if truncate_sources:
                    source = source[:longest]
                fits = not has_sources or 0 < len(source) <= longest
                if fits and 0 < len(target) < limits[1]:
                    yield vocabulary.framed(source) if has_sources else [], [*target, EOS_ID]
                else:
                    num_dropped += 1

    pairs = dataclasses.replace(join_pairs(encoded()), num_dropped=num_dropped)
    if not len(pairs):
        raise InputError(
            f"{', '.join(map(str, files)) or 'texts'}: all {num_dropped} are empty or longer than "
            f"{limits[1]} tokens (sources {limits[0]}): raise the limits"
        )
    if cache is not None:
        store_tokenised(cache, pairs)
    return pairs


def join_pairs(pairs: Iterable[tuple[Ids, Ids]], num_dropped: int = 0) -> TokenisedPairs:
    """The pairs of id sequences, in their order."""
    # Compact: a corpus has millions of pairs.
    ids, ends = (array.array("i"), array.array("i")), (array.array("q"), array.array("q"))
    for pair in pairs:
        for side, sequence in enumerate(pair):
            ids[side].extend(sequence)
            ends[side].append(len(ids[side]))
    return TokenisedPairs(
        source_ids=np.array(ids[0], np.int32),
        source_ends=np.array(ends[0], np.int64),
        target_ids=np.array(ids[1], np.int32),
        target_ends=np.array(ends[1], np.int64),
        num_dropped=num_dropped,
    )


def store_tokenised(cache: Path, pairs: TokenisedPairs) -> None:
    """Keeps the arrays in a file, which appears whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    with reported(cache):
        cache.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(cache) as stream:
            np.savez(stream, **dataclasses.asdict(pairs))


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
        check_numbers(1, tokens_per_batch=tokens_per_batch)
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
        for part in (pairs.source_ids, pairs.source_ends, pairs.target_ids, pairs.target_ends):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def save_position(self, directory: Path) -> None:
        """Writes the fingerprint: where a run stands follows from its step."""
        (directory / _FINGERPRINT_NAME).write_text(self.fingerprint)

    def batches(self, start_step: int = 0, position: Path | None = None) -> Iterator[PairBatch]:
        """Batch ``start_step``, ``start_step + 1``, ... without end.

        Raises:
            InputError: ``position``, a directory that ``save_position`` wrote, is of batches of
                other pairs, in another order or of another size.
        """
        file = position and position / _FINGERPRINT_NAME
        if file and not (file.exists() and file.read_text() == self.fingerprint):
            raise InputError(
                f"the checkpoint of step {start_step} is of other pairs, another seed or batches "
                "of another size: give another output directory, or the data that it was trained on"
            )
        return self._from(start_step)

    def _from(self, start_step: int) -> Iterator[PairBatch]:
        first, offset = divmod(start_step, self.batches_per_epoch)
        for epoch in itertools.count(first):
            for bucket, indices in self._epoch_plan(epoch)[offset:]:
                yield make_batch(self._pairs, bucket, indices)
            offset = 0

    def one_pass(self) -> Iterator[PairBatch]:
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


def make_batch(pairs: TokenisedPairs, bucket: Bucket, indices: np.ndarray) -> PairBatch:
    """The pairs ``indices`` (at most ``bucket.batch_size``), padded to the bucket."""
    rows = bucket.batch_size
    source = _padded(pairs.source_ids, pairs.source_ends, indices, rows, bucket.source)
    target = _padded(pairs.target_ids, pairs.target_ends, indices, rows, bucket.target)
    return batch_of(source, target, num_pairs=len(indices))


def batch_of(source: np.ndarray, target: np.ndarray, *, num_pairs: int) -> PairBatch:
    """A batch of padded ids, [batch, source] and [batch, length]."""
    shifted = np.full_like(target, PAD_ID)
    shifted[:, 1:] = target[:, :-1]
    return PairBatch(
        encoder_input_tokens=source,
        decoder_input_tokens=shifted,
        decoder_target_tokens=target,
        num_pairs=num_pairs,
    )


def _padded(
    ids: np.ndarray, ends: np.ndarray, indices: np.ndarray, rows: int, length: int
) -> np.ndarray:
    padded = np.full((rows, length), PAD_ID, np.int32)
    for row, i in enumerate(indices):
        sequence = ids[ends[i - 1] if i else 0 : ends[i]]
        padded[row, : len(sequence)] = sequence
    return padded
