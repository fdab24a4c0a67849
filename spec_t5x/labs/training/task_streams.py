"""A seqio task or mixture as an endless stream of length-bucketed batches.

Shuffling, repeating and mixing are seqio's own, with one seed; tf.data groups the examples
into buckets. Batch N follows from the settings and N alone. A stream has no index to look
batch N up in, so a run that is resumed is given the position that was saved: the state of
the tf.data iterator, with what waits in its buckets and shuffle buffers. Where there is
none, the batches before N are read and dropped.
"""

import errno
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.data.task_examples import in_order, read_features, reading, task_or_mixture
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError, check_numbers
from spec_t5x.labs.training.batching import PairBatch, TokenisedPairs, batch_of, join_pairs
from spec_t5x.machine.extras import needed

with needed("seqio"):
    import seqio
    import tensorflow as tf

# Of a saved position.
_SETTINGS_NAME, _ITERATOR_NAME = "position.json", "iterator"
# The features of a pair.
_SIDES = ("inputs", "targets")


class PairedTask:
    """A task or mixture of sources and targets, with the model's ids."""

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        *,
        lengths: Mapping[str, int],
        modules: Sequence[str] = (),
        caches: Sequence[str] | None = None,
    ):
        """Looks the name up.

        Args:
            name, modules, caches: as of ``task_examples.task_or_mixture``.
            vocabulary: the model's, in the place of the task's own.
            lengths: tokens that ``inputs`` and ``targets`` are cut to, EOS included.

        Raises:
            InputError: a module cannot be imported, no such task, or one without sources or
                targets of ids.
        """
        self.name, self.lengths = name, dict(lengths)
        self.vocabulary, self.cached = vocabulary, caches is not None
        self.provider = task_or_mixture(name, vocabulary, modules, caches)
        for task in self.tasks:
            _check_is_paired(task)

    @property
    def tasks(self) -> Sequence[seqio.Task]:
        """The task itself, or those of the mixture."""
        return seqio.get_subtasks(self.provider)

    def tasks_with(self, split: str) -> Sequence[seqio.Task]:
        """The tasks that have the split; as seqio has it, some of a mixture may not.

        Raises:
            InputError: none has it.
        """
        with reading(self.name, split):
            splits = {task.name: tuple(task.splits) for task in self.tasks}
        # TFDS knows the splits of what it has prepared only.
        having = [t for t in self.tasks if split in splits[t.name] or not splits[t.name]]
        if not having:
            known = sorted(set().union(*splits.values()))
            raise InputError(f"{self.name} has no split {split!r}: give one of {', '.join(known)}")
        return having

    def dataset(self, split: str, seed: int, num_epochs: int | None) -> tf.data.Dataset:
        """Shuffled pairs of ids, those with an empty side left out.

        Args:
            split: "train", "validation", "test", or what the task has.
            seed: of shuffling, mixing, and preprocessors that draw.
            num_epochs: None repeats without end. A mixture ends with the first task that does.
        """
        self.tasks_with(split)
        with reading(self.name, split):
            dataset = self.provider.get_dataset(
                sequence_length=self.lengths,
                split=split,
                shuffle=True,
                seed=seed,
                num_epochs=num_epochs,
                use_cached=self.cached,
                # A cache in memory would be a part of every saved position.
                try_in_mem_cache=False,
            )
        dataset = dataset.map(
            lambda example: {side: tf.cast(example[side], tf.int32) for side in _SIDES}
        )
        return in_order(dataset.filter(_has_both_sides))

    def pairs(self, split: str, *, limit: int | None = None) -> TokenisedPairs:
        """The first pairs of a split, in order; ``limit`` of each task of a mixture.

        Raises:
            InputError: no such split, it cannot be read, or it holds no pair.
        """
        found = [
            tuple(np.asarray(features[side], np.int32) for side in _SIDES)
            for task in self.tasks_with(split)
            for features in read_features(task, split, self.lengths, limit, self.cached)
        ]
        return self._joined(split, found)

    def shuffled_pairs(self, split: str, seed: int, *, limit: int | None = None) -> TokenisedPairs:
        """The first ``limit`` pairs of the shuffled split or mixture, at most an epoch.

        Raises:
            InputError: as ``pairs``.
        """
        dataset = self.dataset(split, seed, num_epochs=1)
        dataset = dataset if limit is None else dataset.take(limit)
        with reading(self.name, split):
            found = [tuple(each[side] for side in _SIDES) for each in dataset.as_numpy_iterator()]
        return self._joined(split, found)

    def _joined(self, split: str, found: Sequence[tuple[np.ndarray, np.ndarray]]) -> TokenisedPairs:
        kept = [pair for pair in found if all(map(len, pair))]
        if not kept:
            raise InputError(f"split {split!r} of {self.name} holds no pair of texts: give another")
        return join_pairs(kept, num_dropped=len(found) - len(kept))


class TaskStream:
    """The batches of a task or mixture, in a reproducible order."""

    def __init__(
        self,
        task: PairedTask,
        *,
        split: str,
        buckets: Sequence[int],
        tokens_per_batch: int,
        seed: int,
    ):
        """Reads an example, so that data which cannot be read are found now.

        Args:
            task: what to read.
            split: "train", or what the task has.
            buckets: padded lengths, the largest no less than the task's. The longer side of a
                pair decides which it is in; a side is padded no further than the task's length.
            tokens_per_batch: padded tokens of a batch, of the longer side; a bucket of
                length L has ``max(1, tokens_per_batch // L)`` rows.
            seed: decides the order.

        Raises:
            InputError: no such split, it cannot be read, or it holds no pair.
        """
        buckets = sorted(set(buckets))
        longest = max(task.lengths[side] for side in _SIDES)
        check_numbers(1, tokens_per_batch=tokens_per_batch)
        # What is longer than a bucket before it and no longer than the task's lengths.
        buckets = buckets[: 1 + int(np.searchsorted(buckets, longest))]
        self.task, self.split = task, split
        self._settings = {
            "task": task.name,
            "split": split,
            "lengths": task.lengths,
            "vocabulary": task.vocabulary.segmentation_fingerprint(),
            "buckets": buckets,
            "tokens_per_batch": tokens_per_batch,
            "seed": seed,
        }
        self._dataset = in_order(
            _in_buckets(task.dataset(split, seed, None), task.lengths, buckets, tokens_per_batch)
        )
        # Refuses a split that cannot be read, or is empty.
        task.shuffled_pairs(split, seed, limit=1)
        self._held: list[Any] = []
        # Before Python ends: an iterator whose threads call Python would wait for it forever.
        weakref.finalize(self, self._held.clear)
        self._taken = 0

    def batches(self, start_step: int = 0, position: Path | None = None) -> Iterator[PairBatch]:
        """Batch ``start_step``, ``start_step + 1``, ... without end.

        Once for each object: read again, seqio shuffles otherwise, unless a position is given.
        ``save_position`` is about the latest.

        Args:
            start_step: batches to leave out.
            position: what ``save_position`` wrote when so many had been taken; it is read now.
                None reads the batches again.

        Raises:
            InputError: the position is of other data or another step, or reading fails.
        """
        with reading(self.task.name, self.split):
            self._held[:], self._taken = [iter(self._dataset)], 0
            if position is not None:
                self._restore(Path(position), start_step)
            while self._taken < start_step:
                self._next()
        return self._rest()

    @property
    def _iterator(self) -> Any:
        return self._held[0]

    def _rest(self) -> Iterator[PairBatch]:
        while True:
            with reading(self.task.name, self.split):
                arrays = self._next()
            source, target = (arrays[side].numpy() for side in _SIDES)
            yield batch_of(source, target, num_pairs=len(source))

    def save_position(self, directory: Path) -> None:
        """Writes where the stream is: after the batch that was taken last.

        Of a task that reads by a Python generator, as JSON lines, it is the number of batches
        alone, which are then read again.

        Args:
            directory: made if absent.

        Raises:
            OSError: it cannot be written.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        has_iterator = True
        try:
            checkpoint = tf.train.Checkpoint(iterator=self._iterator)
            checkpoint.write(str(directory / _ITERATOR_NAME))
        except (tf.errors.UnimplementedError, tf.errors.FailedPreconditionError):
            has_iterator = False
        except tf.errors.OpError as error:
            raise _as_os_error(error) from error
        values = {"batches": self._taken, "has_iterator": has_iterator, **self._settings}
        (directory / _SETTINGS_NAME).write_text(json.dumps(values, indent=1), encoding="utf-8")

    def _next(self) -> dict[str, tf.Tensor]:
        batch = next(self._iterator)
        self._taken += 1
        return batch

    def _restore(self, position: Path, start_step: int) -> None:
        stored = json.loads((position / _SETTINGS_NAME).read_text(encoding="utf-8"))
        expected = {"batches": start_step, **self._settings}
        for name, value in expected.items():
            if stored[name] != value:
                raise InputError(
                    f"the run in {position} was started with {name} {stored[name]!r}, not "
                    f"{value!r}: leave it as it was, or give another output directory"
                )
        if stored["has_iterator"]:
            checkpoint = tf.train.Checkpoint(iterator=self._iterator)
            checkpoint.read(str(position / _ITERATOR_NAME)).assert_consumed()
            self._taken = start_step


def _as_os_error(error: tf.errors.OpError) -> OSError:
    """TensorFlow's error as the writer of a checkpoint expects it."""
    # "{{function_node ...}} FILE; No space left on device [Op:SaveV2]", of many kinds.
    reason = error.message.rpartition("; ")[2].partition(" [Op:")[0]
    return OSError(errno.EIO, reason)


def _check_is_paired(task: seqio.Task) -> None:
    for side in _SIDES:
        feature = task.output_features.get(side)
        if feature is None:
            raise InputError(
                f"task {task.name} has no feature {side}: give a task of sources and targets"
            )
        if feature.rank != 1 or not feature.dtype.is_integer:
            raise InputError(
                f"task {task.name} has {side} of rank {feature.rank} and type "
                f"{feature.dtype.name}: give a task of token ids"
            )


def _has_both_sides(example: dict[str, tf.Tensor]) -> tf.Tensor:
    return tf.logical_and(*(tf.size(example[side]) > 0 for side in _SIDES))


def _in_buckets(
    dataset: tf.data.Dataset,
    lengths: Mapping[str, int],
    buckets: Sequence[int],
    tokens_per_batch: int,
) -> tf.data.Dataset:
    """Full batches, each of one bucket, as they get full."""
    batches = dataset.bucket_by_sequence_length(
        lambda example: tf.reduce_max([tf.size(example[side]) for side in _SIDES]),
        bucket_boundaries=[length + 1 for length in buckets],
        # The last is of longer pairs, which there are not.
        bucket_batch_sizes=[max(1, tokens_per_batch // length) for length in (*buckets, 1)],
        pad_to_bucket_boundary=True,
    )
    return batches.map(lambda batch: {side: batch[side][:, : lengths[side]] for side in _SIDES})
