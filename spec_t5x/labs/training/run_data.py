"""The training and held-out data of a run, configured in gin: files, or a seqio task.

A gin file selects a subclass of ``TrainingData``, for example ``train.data = @TaskDataOptions()``:
``DataOptions``, ``TaskDataOptions`` or one that contrib registers. *Parts* are "train" and "dev".
"""

import abc
import dataclasses
import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gin

from spec_t5x import registry
from spec_t5x.checkpoints.loading import named_vocabulary
from spec_t5x.data.task_options import TaskOptions
from spec_t5x.data.vocabulary import SPIECE_NAME, SentencePieceVocabulary, Vocabulary
from spec_t5x.errors import InputError, check_at_least, check_unused
from spec_t5x.labs.metrics import TextPairs, metric_by_name
from spec_t5x.labs.text_pairs import read_pairs
from spec_t5x.labs.training.batching import DEFAULT_BUCKETS, Batches, TokenisedPairs, tokenise
from spec_t5x.labs.training.interfaces import Positioned
from spec_t5x.labs.training.packing import PackedBatches
from spec_t5x.labs.training.same_run import train_once
from spec_t5x.labs.training.sentencepiece_training import train_sentencepiece
from spec_t5x.machine.progress import doing
from spec_t5x.options import check_types

log = logging.getLogger(__name__)

# Most pairs that a vocabulary is trained on, sampled from all.
_VOCABULARY_PAIRS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData(abc.ABC):
    """Options and reader of text pairs, or of lines for a model without sources; a base class.

    The types of fields are classes, or unions of them, which are checked.
    """

    # Says whether the data have sources; the model's configuration must have the same value.
    has_source: ClassVar[bool] = True

    # A SentencePiece model (FILE:100 adds T5's extra ids), "bytes", a tokenizer.json, or a model
    # whose vocabulary to use. None uses that of the initial checkpoint or of a draft's target; if
    # there is neither, ``DataOptions`` trains a vocabulary of the model's vocab_size.
    vocabulary: str | None = None
    buckets: tuple = DEFAULT_BUCKETS
    tokens_per_batch: int = 4096  # rows times the longer side's padded length

    def __post_init__(self):
        check_types(self)
        if max(self.longest) > max(self.buckets):
            name = type(self).__name__
            raise InputError(
                f"texts have up to {max(self.longest)} tokens and the largest of {name}.buckets is "
                f"{max(self.buckets)}: add a bucket, or lower the texts' length"
            )

    @abc.abstractmethod
    def name(self, part: str) -> str | None:
        """Returns the name of a part's data, for messages; None if there is no dev part."""

    @property
    @abc.abstractmethod
    def longest(self) -> tuple[int, int]:
        """Maximal numbers of tokens of a source and of a target, EOS included."""

    @property
    def stored(self) -> dict[str, int]:
        """Entry of a trained model's config.json: the most tokens of a source, if any."""
        return {"max_source_length": self.longest[0]} if self.has_source else {}

    @abc.abstractmethod
    def read(
        self, part: str, vocabulary: Vocabulary, seed: int, first: int | None
    ) -> TokenisedPairs:
        """Reads and tokenizes the pairs of ``part``; those after the ``first`` may be left out.

        The training pairs of a seqio task are one epoch, shuffled by ``seed``.
        """

    def scored(self, vocabulary: Vocabulary, examples: int | None) -> list[TextPairs]:
        """Reads the first ``examples`` dev pairs (None: all), on which a model's texts are scored.

        Raises:
            InputError: this kind of data cannot be scored.
        """
        raise InputError(f"train.metrics cannot score {type(self).__name__}: leave metrics out")

    def train_vocabulary(self, directory: Path, vocab_size: int) -> Vocabulary:
        """Trains a vocabulary in ``directory``, or loads the one that was trained there before.

        Raises:
            InputError: this kind of data needs a given vocabulary.
        """
        raise InputError(
            f"{type(self).__name__}.vocabulary is None: give a SentencePiece model, 'bytes', or an "
            "initial checkpoint, which has one"
        )

    def own_vocabulary(self, directory: Path, vocab_size: int) -> Vocabulary:
        """Loads ``vocabulary`` or, if None, trains one; raises for more than ``vocab_size`` ids."""
        if self.vocabulary:
            vocabulary = named_vocabulary(self.vocabulary, vocab_size)
        else:
            vocabulary = self.train_vocabulary(directory / "vocabulary", vocab_size)
        if vocabulary.vocab_size > vocab_size:
            raise InputError(
                f"{self.vocabulary or directory / 'vocabulary'} has {vocabulary.vocab_size} "
                f"pieces, the model's vocab_size is {vocab_size}: raise vocab_size"
            )
        return vocabulary

    def pairs(
        self, part: str, vocabulary: Vocabulary, seed: int, first: int | None = None
    ) -> TokenisedPairs:
        """Returns a part's ``first`` pairs (None: all), and logs their number and lengths."""
        with doing(log, f"reading and tokenizing {self.name(part)}"):
            pairs = self.read(part, vocabulary, seed, first)
        source, target = (texts.lengths.mean() for texts in (pairs.source, pairs.target))
        lengths = f"pairs of {source:.1f} and {target:.1f}" if source else f"lines of {target:.1f}"
        dropped = f"{pairs.num_dropped:,} dropped (too long, or empty)"
        log.info(f"{self.name(part)}: {len(pairs):,} {lengths} tokens; {dropped}")
        return pairs if first is None else pairs.first(first)

    def train_batches(self, vocabulary: Vocabulary, seed: int) -> Positioned:
        """Reads the training data and returns their batches."""
        batches = self.batches(self.pairs("train", vocabulary, seed), seed)
        log.info(f"{batches.batches_per_epoch:,} batches an epoch")
        return batches

    def train_and_dev(self, vocabulary: Vocabulary, seed: int) -> tuple[Positioned, Batches | None]:
        """Returns training batches, and held-out batches or None if there is no dev part."""
        train, has_dev = self.train_batches(vocabulary, seed), self.name("dev") is not None
        return train, self.batches(self.pairs("dev", vocabulary, seed), seed) if has_dev else None

    def batches(self, pairs: TokenisedPairs, seed: int) -> Batches:
        """Makes batches of ``pairs``, with this object's buckets and tokens per batch."""
        options = {"tokens_per_batch": self.tokens_per_batch, "buckets": self.buckets}
        return Batches(pairs, seed=seed, **options)

    def check_readable(self) -> None:  # noqa: B027, a task has no files
        """Raises ``InputError`` if a file is absent, or its first line is wrong."""

    def check_for_draft(self) -> None:
        """Raises ``InputError`` as ``check_readable`` does, or if ``vocabulary`` is set."""
        self.check_readable()
        if self.vocabulary is not None:
            raise InputError(
                f"{type(self).__name__}.vocabulary is {self.vocabulary!r}: leave it out, because a "
                "draft has its target's"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(TrainingData):
    """Options and reader of tab-separated files of text pairs."""

    directory: str  # the folder of the files
    train_file: str
    dev_file: str | None = None
    # Columns count from 0; None gives the defaults of ``labs.text_pairs.read_pairs``.
    source_column: int | None = None
    target_column: int | None = None
    num_columns: int | None = None
    # Text in front of every source, as in T5's tasks ("summarize: ").
    source_prefix: str = ""
    # Metric of the texts that are generated for the dev file's sources: a name of
    # ``labs.metrics.METRICS``.
    metric: str = "bleu"
    max_source_length: int = 96  # tokens, EOS included
    max_target_length: int = 96
    # Cut longer sources, as T5 does, instead of dropping their pairs.
    truncate_sources: bool = False
    # Train on rows of the maximal lengths that hold several pairs each (``packing.py``), instead
    # of buckets. Not for drafts.
    packed: bool = False

    def __post_init__(self):
        super().__post_init__()
        metric_by_name(self.metric)

    def _path(self, part: str) -> Path:
        return Path(self.directory) / self.name(part)

    @property
    def _columns(self) -> tuple[int | None, int | None, int | None]:
        return self.source_column, self.target_column, self.num_columns

    def _prefixed(self, part: str) -> Iterator[tuple[str, str]]:
        """Yields a part's pairs, with the prefix in front of sources that are not empty."""
        for source, target in read_pairs(self._path(part), *self._columns):
            yield source and self.source_prefix + source, target

    def name(self, part: str) -> str | None:
        """Returns the name of the part's file; None if there is no dev file."""
        return self.train_file if part == "train" else self.dev_file

    @property
    def longest(self) -> tuple[int, int]:
        """Tuple of ``max_source_length`` and ``max_target_length``."""
        return self.max_source_length, self.max_target_length

    def train_batches(self, vocabulary: Vocabulary, seed: int) -> Positioned:
        """Returns the training batches, packed if the options say so."""
        if not self.packed:
            return super().train_batches(vocabulary, seed)
        options = {"lengths": self.longest, "tokens_per_batch": self.tokens_per_batch}
        batches = PackedBatches(self.pairs("train", vocabulary, seed), seed=seed, **options)
        log.info(f"{batches.batches_per_epoch:,} packed batches an epoch")
        return batches

    def check_readable(self) -> None:
        """Reads the first line of each file."""
        for part in ("train", "dev"):
            if self.name(part) is not None:
                next(self._prefixed(part))

    def check_for_draft(self) -> None:
        """Checks what the base class does, and options that drafts do not have."""
        super().check_for_draft()
        check_unused(self, "drafts learn from one pair a row", "packed")
        check_unused(self, "no texts of a draft are scored", "metric")

    def train_vocabulary(self, directory: Path, vocab_size: int) -> Vocabulary:
        """Trains a SentencePiece vocabulary on sources and targets, or loads ``directory``'s."""
        path, file = directory / SPIECE_NAME, self._path("train")

        def train() -> None:
            log.info(f"training a vocabulary of {vocab_size} pieces")
            pairs = list(read_pairs(file, *self._columns))
            # A constant seed, so that the vocabulary does not depend on the training's.
            pairs = random.Random(0).sample(pairs, min(_VOCABULARY_PAIRS, len(pairs)))
            # Trained under another name and renamed, so that a kill leaves no incomplete file.
            trained = train_sentencepiece(
                itertools.chain.from_iterable(pairs), path.with_name("unfinished"), vocab_size
            )
            trained.with_suffix(".vocab").replace(path.with_suffix(".vocab"))
            trained.replace(path)

        train_once(path, [file], (vocab_size, self._columns), train)
        return SentencePieceVocabulary(path)

    def read(
        self, part: str, vocabulary: Vocabulary, seed: int, first: int | None
    ) -> TokenisedPairs:
        """Reads all pairs of the part's file, in order; ignores ``seed`` and ``first``."""
        return tokenise(
            self._prefixed(part),
            vocabulary,
            self.longest,
            truncate_sources=self.truncate_sources,
            name=str(self._path(part)),
        )

    def scored(self, vocabulary: Vocabulary, examples: int | None) -> list[TextPairs]:
        """Reads the dev file's first pairs with a source; cuts sources that are too long."""
        given = (pair for pair in self._prefixed("dev") if pair[0])
        pairs = list(itertools.islice(given, examples))
        if not pairs:
            raise InputError(
                f"{self.dev_file} has no pair with a source: give a file with text to score on"
            )
        name, longest = Path(self.dev_file).name.partition(".")[0], self.max_source_length
        ids = [vocabulary.framed(vocabulary.encode(source), longest) for source, _ in pairs]
        return [TextPairs(name=name, pairs=pairs, metric=metric_by_name(self.metric), ids=ids)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskDataOptions(TrainingData, TaskOptions):
    """Options and reader of a seqio task or mixture, with the model's vocabulary."""

    mixture_or_task: str = dataclasses.field()
    train_split: str = "train"
    dev_split: str | None = "validation"
    # Number of examples to read of each task's dev split, from the first; None reads all.
    dev_examples: int | None = None

    def __post_init__(self):
        self.check_task()
        if set(self.task_feature_lengths or ()) != {"inputs", "targets"}:
            raise InputError(
                f"task_feature_lengths is {self.task_feature_lengths}: give tokens of both sides, "
                "{'inputs': 512, 'targets': 128}"
            )
        super().__post_init__()
        check_at_least(self, dev_examples=1)

    def name(self, part: str) -> str | None:
        """Returns the task's name and the part's split; None if there is no dev split."""
        split = self.train_split if part == "train" else self.dev_split
        return split and f"{self.mixture_or_task} ({split})"

    @property
    def longest(self) -> tuple[int, int]:
        """Lengths of ``inputs`` and ``targets`` in ``task_feature_lengths``."""
        return self.task_feature_lengths["inputs"], self.task_feature_lengths["targets"]

    def task(self, vocabulary: Vocabulary) -> Any:
        """Returns the task or mixture, a ``task_streams.PairedTask``, with the model's ids.

        Raises:
            InputError: the task is unknown, or has no sources or targets of ids.
        """
        # Imported here because seqio imports TensorFlow, which takes seconds.
        from spec_t5x.labs.training.task_streams import PairedTask

        return PairedTask(
            self.mixture_or_task,
            vocabulary,
            lengths=self.task_feature_lengths,
            modules=self.modules,
            caches=self.caches,
        )

    def train_batches(self, vocabulary: Vocabulary, seed: int) -> Positioned:
        """Returns an endless stream of batches, mixed, shuffled and repeated by seqio."""
        from spec_t5x.labs.training.task_streams import TaskStream

        options = {"buckets": self.buckets, "tokens_per_batch": self.tokens_per_batch}
        return TaskStream(self.task(vocabulary), split=self.train_split, seed=seed, **options)

    def read(
        self, part: str, vocabulary: Vocabulary, seed: int, first: int | None
    ) -> TokenisedPairs:
        """Reads an epoch of "train", shuffled by ``seed``, or the dev splits in order.

        A mixture's epoch ends with its first task that ends; its tasks give equal shares of dev.
        """
        task = self.task(vocabulary)
        if part == "train":
            return task.shuffled_pairs(self.train_split, seed, limit=first)
        of_each = first and -(-first // len(task.tasks_with(self.dev_split)))
        given = [limit for limit in (self.dev_examples, of_each) if limit is not None]
        return task.pairs(self.dev_split, limit=min(given, default=None))

    def scored(self, vocabulary: Vocabulary, examples: int | None) -> list[TextPairs]:
        """Reads the first examples of each task's dev split, with the task's metrics."""
        from spec_t5x.labs.task_scores import read_examples

        given = self.dev_split, self.task_feature_lengths, examples, self.use_cached_tasks
        tasks = self.task(vocabulary).tasks_with(self.dev_split)
        return [read_examples(task, *given) for task in tasks]


def kinds_of_data() -> dict[str, type[TrainingData]]:
    """Returns the subclasses of ``TrainingData`` by their names in gin, contrib's included."""
    own = {each.__name__: each for each in (DataOptions, TaskDataOptions)}
    return own | registry.find_all("training data")


for _settings in (DataOptions, TaskDataOptions):
    gin.external_configurable(_settings, module="spec_t5x")
