"""A seqio task or mixture as an endless stream of length-bucketed batches.

seqio shuffles, repeats and mixes, with one seed; tf.data groups the examples into buckets. Batch N
is determined by the settings and N, but can only be reached by reading. So a resumed run restores
the saved *position*: the state of the tf.data iterator, with the examples in its buckets and
shuffle buffers. If the iterator's state was not saved, the batches before N are read and dropped.
"""

import errno
import hashlib
import json
import tempfile
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

# File names of a saved position.
_SETTINGS_NAME, _ITERATOR_NAME = "position.json", "iterator"
# The features that make a pair.
_SIDES = ("inputs", "targets")


def _digest(vocabulary: Vocabulary) -> str:
    """Returns a hash of a vocabulary's pieces and files, which determine the ids of any text."""
    # ByT5's vocabulary has no file, and encodes a sentinel's name as the sentinel or as bytes.
    sentinel = vocabulary.encode("<extra_id_0>")
    found = hashlib.sha256(f"{vocabulary.fingerprint()} {sentinel}".encode())
    with tempfile.TemporaryDirectory() as folder:
        vocabulary.save(folder)
        for path in sorted(Path(folder).iterdir()):
            found.update(path.read_bytes())
    return found.hexdigest()


class PairedTask:
    """A seqio task or mixture of ``inputs`` and ``targets``, with the model's ids."""

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        *,
        lengths: Mapping[str, int],
        modules: Sequence[str] = (),
        caches: Sequence[str] | None = None,
    ):
        """Looks up the task; arguments are those of ``task_examples.task_or_mixture``.

        ``inputs`` and ``targets`` are cut to ``lengths``, in tokens, EOS included.

        Raises:
            InputError: the task is unknown, or has no sources or targets of ids.
        """
        self.name, self.lengths = name, dict(lengths)
        self.vocabulary, self.cached = vocabulary, caches is not None
        self.provider = task_or_mixture(name, vocabulary, modules, caches)
        self.tasks: Sequence[seqio.Task] = seqio.get_subtasks(self.provider)
        for task in self.tasks:
            for side in _SIDES:
                feature = task.output_features.get(side)
                if feature is None:
                    raise InputError(
                        f"task {task.name} has no feature {side}: give a task of sources and "
                        "targets"
                    )
                if feature.rank != 1 or not feature.dtype.is_integer:
                    raise InputError(
                        f"task {task.name} has {side} of rank {feature.rank} and type "
                        f"{feature.dtype.name}: give a task of token ids"
                    )

    def tasks_with(self, split: str) -> Sequence[seqio.Task]:
        """Returns the tasks that have ``split``; as in seqio, a mixture's other tasks are skipped.

        Raises:
            InputError: no task has the split.
        """
        with reading(self.name, split):
            splits = {task.name: tuple(task.splits) for task in self.tasks}
        # TFDS lists no splits before the data are prepared: these tasks count as having it.
        having = [t for t in self.tasks if split in splits[t.name] or not splits[t.name]]
        if not having:
            known = sorted(set().union(*splits.values()))
            raise InputError(f"{self.name} has no split {split!r}: give one of {', '.join(known)}")
        return having

    def dataset(self, split: str, seed: int, num_epochs: int | None) -> tf.data.Dataset:
        """Returns the split's ``inputs`` and ``targets``, ids, shuffled by ``seed``.

        Pairs with an empty side are left out. If ``num_epochs`` is None, the split repeats without
        end; otherwise a mixture ends with its first task that ends.
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
                # tf.data would write a cache in memory to every saved position.
                try_in_mem_cache=False,
            )
        dataset = dataset.map(
            lambda example: {side: tf.cast(example[side], tf.int32) for side in _SIDES}
        )
        return in_order(
            dataset.filter(lambda pair: tf.logical_and(*(tf.size(pair[s]) > 0 for s in _SIDES)))
        )

    def pairs(self, split: str, *, limit: int | None = None) -> TokenisedPairs:
        """Reads the first ``limit`` pairs (None: all) of each task's split, unshuffled."""
        examples = (
            features
            for task in self.tasks_with(split)
            for features in read_features(task, split, self.lengths, limit, self.cached)
        )
        return self._joined(split, examples)

    def shuffled_pairs(self, split: str, seed: int, *, limit: int | None = None) -> TokenisedPairs:
        """Reads the first ``limit`` pairs (None: all) of a shuffled epoch of split or mixture."""
        dataset = self.dataset(split, seed, num_epochs=1)
        dataset = dataset if limit is None else dataset.take(limit)
        with reading(self.name, split):
            return self._joined(split, dataset.as_numpy_iterator())

    def _joined(self, split: str, examples: Iterator[Mapping[str, Any]]) -> TokenisedPairs:
        sides = (tuple(np.asarray(each[side], np.int32) for side in _SIDES) for each in examples)
        pairs = join_pairs(pair if all(map(len, pair)) else None for pair in sides)
        if not len(pairs):
            raise InputError(f"split {split!r} of {self.name} holds no pair of texts: give another")
        return pairs


class TaskStream:
    """The endless batches of a task or mixture, in a reproducible order."""

    def __init__(
        self,
        task: PairedTask,
        *,
        split: str,
        buckets: Sequence[int],
        tokens_per_batch: int,
        seed: int,
    ):
        """Prepares the dataset and reads one pair, so that unreadable data raise an error here.

        ``buckets`` and ``tokens_per_batch`` are those of ``batching.Batches``. Both sides are
        padded to the bucket's length, but to no more than the side's length in ``task.lengths``.

        Raises:
            InputError: the split is unknown, cannot be read, or holds no pair.
        """
        check_numbers(1, tokens_per_batch=tokens_per_batch)
        buckets = sorted(set(buckets))
        # Drops buckets longer than any pair within the task's lengths needs.
        buckets = buckets[: 1 + int(np.searchsorted(buckets, max(task.lengths.values())))]
        self.task, self.split = task, split
        self._settings = {
            "task": task.name,
            "split": split,
            "lengths": task.lengths,
            "vocabulary": _digest(task.vocabulary),
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
        # Deletes the iterator before Python exits: later it would wait forever for its threads.
        weakref.finalize(self, self._held.clear)
        self._taken = 0

    def batches(self, start_step: int = 0, position: Path | None = None) -> Iterator[PairBatch]:
        """Yields batch ``start_step``, ``start_step + 1``, ... without end.

        ``position`` is a directory that ``save_position`` wrote after ``start_step`` batches. If it
        is None, the batches before ``start_step`` are read again, and ``batches`` must be called
        once for each object, because seqio shuffles differently the second time.

        Raises:
            InputError: the position is of other data or another step, or reading fails.
        """
        with reading(self.task.name, self.split):
            self._held[:], self._taken = [iter(self._dataset)], 0
            if position is not None:
                self._restore(Path(position), start_step)
            while self._taken < start_step:
                self._next()
        # A nested generator, so that the position is read at the call.
        return self._rest()

    def _rest(self) -> Iterator[PairBatch]:
        while True:
            with reading(self.task.name, self.split):
                arrays = self._next()
            source, target = (arrays[side].numpy() for side in _SIDES)
            yield batch_of(source, target, num_pairs=len(source))

    def _next(self) -> dict[str, tf.Tensor]:
        batch = next(self._held[0])
        self._taken += 1
        return batch

    def save_position(self, directory: Path) -> None:
        """Writes the position after the batch that was yielded last to ``directory``.

        tf.data cannot save an iterator over a Python generator (a task of JSON lines). Then only
        the number of batches is written, and a resumed run reads these batches again.

        Raises:
            OSError: the position cannot be written.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        has_iterator = True
        try:
            tf.train.Checkpoint(iterator=self._held[0]).write(str(directory / _ITERATOR_NAME))
        except (tf.errors.UnimplementedError, tf.errors.FailedPreconditionError):
            has_iterator = False
        except tf.errors.OpError as error:
            # "{{function_node ...}} FILE; No space left on device [Op:SaveV2]", of many kinds.
            reason = error.message.rpartition("; ")[2].partition(" [Op:")[0]
            raise OSError(errno.EIO, reason) from error
        values = {"batches": self._taken, "has_iterator": has_iterator, **self._settings}
        (directory / _SETTINGS_NAME).write_text(json.dumps(values, indent=1), encoding="utf-8")

    def _restore(self, position: Path, start_step: int) -> None:
        stored = json.loads((position / _SETTINGS_NAME).read_text(encoding="utf-8"))
        for name, value in {"batches": start_step, **self._settings}.items():
            if stored[name] != value:
                raise InputError(
                    f"the run in {position} was started with {name} {stored[name]!r}, not "
                    f"{value!r}: give the earlier value, or another output directory"
                )
        if stored["has_iterator"]:
            checkpoint = tf.train.Checkpoint(iterator=self._held[0])
            checkpoint.read(str(position / _ITERATOR_NAME)).assert_consumed()
            self._taken = start_step


def _in_buckets(
    dataset: tf.data.Dataset,
    lengths: Mapping[str, int],
    buckets: Sequence[int],
    tokens_per_batch: int,
) -> tf.data.Dataset:
    """Groups pairs into padded batches, each of one bucket, and emits a batch once it is full."""
    batches = dataset.bucket_by_sequence_length(
        lambda example: tf.reduce_max([tf.size(example[side]) for side in _SIDES]),
        bucket_boundaries=[length + 1 for length in buckets],
        # tf.data requires a last size, for pairs that fit no bucket: there are none.
        bucket_batch_sizes=[max(1, tokens_per_batch // length) for length in (*buckets, 1)],
        pad_to_bucket_boundary=True,
    )
    return batches.map(lambda batch: {side: batch[side][:, : lengths[side]] for side in _SIDES})
