"""The data of a run, as a gin file says: text pairs from files or seqio's tasks.

A ``TrainingData`` is ``DataOptions``, ``TaskDataOptions`` or a kind that contrib registers:
``train.data = @TaskDataOptions()``.
"""

import abc
import dataclasses
import functools
import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import gin

from spec_t5x import registry
from spec_t5x.checkpoints.loading import named_vocabulary
from spec_t5x.data.metrics import check_installed, metric_by_name
from spec_t5x.data.task_options import TaskOptions
from spec_t5x.data.tsv import read_pairs
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    SentencePieceVocabulary,
    Vocabulary,
    train_sentencepiece,
)
from spec_t5x.errors import InputError, check_at_least
from spec_t5x.labs.training.batching import DEFAULT_BUCKETS, Batches, TokenisedPairs, tokenise
from spec_t5x.labs.training.text_metrics import ScoredTexts
from spec_t5x.labs.training.trainer import Positioned
from spec_t5x.machine.progress import doing

log = logging.getLogger(__name__)

# Number of pairs that a vocabulary is trained on, sampled from all.
_VOCABULARY_PAIRS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData(abc.ABC):
    """Text pairs, or lines, with their vocabulary and batches."""

    # Says whether there are sources, as the model to train has them or has them not.
    has_source: ClassVar[bool] = True

    # A SentencePiece model (FILE:100 adds T5's extra ids), "bytes", a tokenizer.json, or a model
    # whose vocabulary to take. None takes that of an initial checkpoint or of a target; without
    # one, files train a vocabulary of the model's vocab_size.
    vocabulary: str | None = None
    buckets: Sequence[int] = DEFAULT_BUCKETS
    tokens_per_batch: int = 4096  # padded, of the longer side

    def __post_init__(self):
        if max(self.longest) > max(self.buckets):
            name = type(self).__name__
            raise InputError(
                f"texts have up to {max(self.longest)} tokens and the largest of {name}.buckets is "
                f"{max(self.buckets)}: add a bucket, or lower the texts' length"
            )

    @abc.abstractmethod
    def name(self, part: str) -> str | None:
        """Names the data of "train" or "dev"; None without."""

    @property
    @abc.abstractmethod
    def longest(self) -> tuple[int, int]:
        """Maximal tokens of a source and of a target, EOS included."""

    @abc.abstractmethod
    def read(
        self, part: str, vocabulary: Vocabulary, seed: int, first: int | None
    ) -> TokenisedPairs:
        """Reads the tokens of "train" or "dev", of a task those of an epoch.

        Only the ``first`` pairs need be read.
        """

    def scored(self, vocabulary: Vocabulary, examples: int | None) -> list[ScoredTexts]:
        """Reads the first held-out sources, to score the texts that are generated for them.

        Raises:
            InputError: the data have no sources.
        """
        raise InputError(f"train.metrics cannot score {type(self).__name__}: leave them out")

    def train_vocabulary(self, directory: Path, vocab_size: int) -> Vocabulary:
        """Trains a vocabulary for the data, or reads the one that was trained before.

        Raises:
            InputError: not for this data.
        """
        raise InputError(
            f"{type(self).__name__}.vocabulary is None: give a SentencePiece model, 'bytes', or an "
            "initial checkpoint, which has one"
        )

    def own_vocabulary(self, directory: Path, vocab_size: int) -> Vocabulary:
        """Loads the given vocabulary, or trains one, for a model of ``vocab_size``."""
        if self.vocabulary:
            vocabulary = named_vocabulary(self.vocabulary, vocab_size)
        else:
            vocabulary = self.train_vocabulary(directory / "vocabulary", vocab_size)
        if vocabulary.vocab_size > vocab_size:
            raise InputError(
                f"{self.vocabulary or directory / 'vocabulary'} has {vocabulary.vocab_size} "
                f"pieces, the model's vocab_size is {vocab_size}: raise it"
            )
        return vocabulary

    def pairs(
        self, part: str, vocabulary: Vocabulary, seed: int, first: int | None = None
    ) -> TokenisedPairs:
        """Returns the first pairs of "train" or "dev", or all; logs how many there are."""
        with doing(log, f"reading and tokenizing {self.name(part)}"):
            pairs = self.read(part, vocabulary, seed, first)
        source, target = (texts.lengths.mean() for texts in (pairs.source, pairs.target))
        lengths = f"pairs of {source:.1f} and {target:.1f}" if source else f"lines of {target:.1f}"
        dropped = f"{pairs.num_dropped:,} dropped (too long, or empty)"
        log.info(f"{self.name(part)}: {len(pairs):,} {lengths} tokens; {dropped}")
        return pairs if first is None else pairs.first(first)

    def train_batches(self, vocabulary: Vocabulary, seed: int) -> Positioned:
        """Returns the training batches."""
        batches = self.batches(self.pairs("train", vocabulary, seed), seed)
        log.info(f"{batches.batches_per_epoch:,} batches an epoch")
        return batches

    def train_and_dev(self, vocabulary: Vocabulary, seed: int) -> tuple[Positioned, Batches | None]:
        """Returns training and held-out batches."""
        train, has_dev = self.train_batches(vocabulary, seed), self.name("dev") is not None
        return train, self.batches(self.pairs("dev", vocabulary, seed), seed) if has_dev else None

    def batches(self, pairs: TokenisedPairs, seed: int) -> Batches:
        """Makes the batches of the data's pairs, or of others with the same sources."""
        options = {"tokens_per_batch": self.tokens_per_batch, "buckets": self.buckets}
        return Batches(pairs, seed=seed, **options)

    def check_inherits_vocabulary(self) -> None:
        """Raises ``InputError`` where a vocabulary is given in place of the target's."""
        if self.vocabulary is not None:
            raise InputError(
                f"{type(self).__name__}.vocabulary is {self.vocabulary!r}: leave it out, it is the "
                "target's"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(TrainingData):
    """Files of text pairs."""

    directory: str  # the files' names are relative to it
    train_file: str
    dev_file: str | None = None
    # None is as usual (``data.tsv.read_pairs``).
    source_column: int | None = None
    target_column: int | None = None
    num_columns: int | None = None
    # Added in front of every source, as in T5's tasks ("summarize: ").
    source_prefix: str = ""
    # Scores the texts that are generated for the dev file's sources: a name of
    # ``data.metrics.METRICS``.
    metric: str = "bleu"
    max_source_length: int = 96  # tokens, EOS included
    max_target_length: int = 96
    # Cut longer sources, as T5 does, instead of dropping their pairs.
    truncate_sources: bool = False

    def __post_init__(self):
        super().__post_init__()
        metric_by_name(self.metric)

    def _path(self, part: str) -> Path:
        return Path(self.directory) / self.name(part)

    @property
    def _columns(self) -> tuple[int | None, int | None, int | None]:
        return self.source_column, self.target_column, self.num_columns

    def _prefixed(self, part: str) -> Iterator[tuple[str, str]]:
        """Yields the pairs of a file; an empty source stays empty."""
        for source, target in read_pairs(self._path(part), *self._columns):
            yield source and self.source_prefix + source, target

    def name(self, part: str) -> str | None:
        """Returns the file's name."""
        return self.train_file if part == "train" else self.dev_file

    @property
    def longest(self) -> tuple[int, int]:
        """The options' maximal lengths."""
        return self.max_source_length, self.max_target_length

    def train_vocabulary(self, directory: Path, vocab_size: int) -> Vocabulary:
        """Trains a SentencePiece vocabulary of both sides."""
        path = directory / SPIECE_NAME
        if not path.is_file():
            log.info(f"training a vocabulary of {vocab_size} pieces")
            pairs = list(read_pairs(self._path("train"), *self._columns))
            # A separate generator: the sample does not depend on the training seed.
            pairs = random.Random(0).sample(pairs, min(_VOCABULARY_PAIRS, len(pairs)))
            # Trained aside and renamed, so that a kill leaves no half file behind.
            trained = train_sentencepiece(
                itertools.chain.from_iterable(pairs), path.with_name("unfinished"), vocab_size
            )
            trained.with_suffix(".vocab").replace(path.with_suffix(".vocab"))
            trained.replace(path)
        return SentencePieceVocabulary(path)

    def read(
        self, part: str, vocabulary: Vocabulary, seed: int, first: int | None
    ) -> TokenisedPairs:
        """Reads all pairs of the file."""
        return tokenise(
            self._prefixed(part),
            vocabulary,
            self.longest,
            truncate_sources=self.truncate_sources,
            name=str(self._path(part)),
        )

    def scored(self, vocabulary: Vocabulary, examples: int | None) -> list[ScoredTexts]:
        """Reads the dev file; sources that are too long are cut, empty ones skipped."""
        metric = metric_by_name(self.metric)
        check_installed([metric])
        given = (pair for pair in self._prefixed("dev") if pair[0])
        pairs = list(itertools.islice(given, examples))
        if not pairs:
            raise InputError(
                f"{self.dev_file} has no pair with a source: give a file with text to score on"
            )
        sources, targets = map(list, zip(*pairs, strict=True))
        longest = self.max_source_length
        return [
            ScoredTexts(
                name=Path(self.dev_file).name.partition(".")[0],
                sources=sources,
                ids=[vocabulary.framed(vocabulary.encode(text), longest) for text in sources],
                targets=targets,
                score=functools.partial(metric, targets),
            )
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskDataOptions(TrainingData, TaskOptions):
    """A seqio task or mixture, read with the model's vocabulary."""

    mixture_or_task: str = dataclasses.field()
    train_split: str = "train"
    dev_split: str | None = "validation"
    # Take this many of each task's dev split, the first ones; None takes all.
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
        """Names the task and its split."""
        split = self.train_split if part == "train" else self.dev_split
        return split and f"{self.mixture_or_task} ({split})"

    @property
    def longest(self) -> tuple[int, int]:
        """The lengths of the task's features."""
        return self.task_feature_lengths["inputs"], self.task_feature_lengths["targets"]

    def task(self, vocabulary: Vocabulary) -> Any:
        """Looks up the task or mixture, a ``task_streams.PairedTask``, with the model's ids.

        Raises:
            InputError: an unknown task, or one that cannot be trained on.
        """
        # Imported here: seqio brings TensorFlow along, seconds that a file does not need.
        from spec_t5x.labs.training.task_streams import PairedTask

        return PairedTask(
            self.mixture_or_task,
            vocabulary,
            lengths=self.task_feature_lengths,
            modules=self.modules,
            caches=self.caches,
        )

    def train_batches(self, vocabulary: Vocabulary, seed: int) -> Positioned:
        """Returns a stream that mixes, shuffles and repeats as seqio does."""
        from spec_t5x.labs.training.task_streams import TaskStream

        options = {"buckets": self.buckets, "tokens_per_batch": self.tokens_per_batch}
        return TaskStream(self.task(vocabulary), split=self.train_split, seed=seed, **options)

    def read(
        self, part: str, vocabulary: Vocabulary, seed: int, first: int | None
    ) -> TokenisedPairs:
        """Reads for "train" what ``train_batches`` would, and for "dev" as many of each task.

        A mixture's epoch ends with the first of its tasks.
        """
        task = self.task(vocabulary)
        if part == "train":
            return task.shuffled_pairs(self.train_split, seed, limit=first)
        of_each = first and -(-first // len(task.tasks_with(self.dev_split)))
        given = [limit for limit in (self.dev_examples, of_each) if limit is not None]
        return task.pairs(self.dev_split, limit=min(given, default=None))

    def scored(self, vocabulary: Vocabulary, examples: int | None) -> list[ScoredTexts]:
        """Reads the dev split of each task, which the task's own metrics score."""
        from spec_t5x.data.task_examples import read_examples

        found, given = [], (self.task_feature_lengths, examples, self.use_cached_tasks)
        for each in self.task(vocabulary).tasks_with(self.dev_split):
            task = read_examples(each, self.dev_split, *given)
            found.append(
                ScoredTexts(
                    name=task.name,
                    sources=[each.source for each in task.examples],
                    ids=[each.features["inputs"].tolist() for each in task.examples],
                    targets=[each.target for each in task.examples],
                    score=functools.partial(task.score, task.examples),
                )
            )
        return found


def kinds_of_data() -> dict[str, type[TrainingData]]:
    """Returns the kinds of data by the names that gin has for them."""
    own = {each.__name__: each for each in (DataOptions, TaskDataOptions)}
    return own | registry.find_all("training data")


for _settings in (DataOptions, TaskDataOptions):
    gin.external_configurable(_settings, module="spec_t5x")
