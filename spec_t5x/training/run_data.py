"""What a run trains on, as a gin file says: files of text pairs, or seqio's tasks.

``DataOptions`` and ``TaskDataOptions`` are given in each other's place
(``train.data = @TaskDataOptions()``), wherever there is a ``TrainingData``.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import gin

from spec_t5x.checkpoints.storage.vocabularies import make_vocabulary
from spec_t5x.data.batching import DEFAULT_BUCKETS, Batches, TokenisedPairs, tokenise_file
from spec_t5x.data.metrics import metric_by_name
from spec_t5x.data.task_options import TaskOptions
from spec_t5x.data.tsv import read_pairs
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    SentencePieceVocabulary,
    Vocabulary,
    train_sentencepiece,
)
from spec_t5x.errors import InputError
from spec_t5x.training.progress import say
from spec_t5x.training.text_metrics import Evaluator
from spec_t5x.training.trainer import Positioned


@runtime_checkable
class TrainingData(Protocol):
    """Text pairs, their vocabulary and batches."""

    vocabulary: str | None
    buckets: Sequence[int]
    tokens_per_batch: int

    @property
    def train_name(self) -> str:
        """What is trained on, in words."""

    @property
    def dev_name(self) -> str | None:
        """What is held out, in words; None without."""

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of a source and of a target at most, EOS included."""

    def own_vocabulary(self, directory: Path, vocab_size: int) -> Vocabulary:
        """The vocabulary for a model of ``vocab_size`` that inherits none."""

    def train_batches(
        self, vocabulary: Vocabulary, cache_dir: Path, seed: int
    ) -> Batches | Positioned:
        """What to train on."""

    def train_pairs(
        self, vocabulary: Vocabulary, cache_dir: Path, seed: int, first: int | None
    ) -> TokenisedPairs:
        """The first so many of what to train on, or an epoch."""

    def dev_pairs(
        self, vocabulary: Vocabulary, cache_dir: Path, first: int | None = None
    ) -> TokenisedPairs | None:
        """The first so many of what is held out, or all; None where nothing is."""

    def evaluator(self, vocabulary: Vocabulary, directory: Path, examples: int | None) -> Evaluator:
        """Scores texts for the sources that are held out, of which the first so many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The pairs, the vocabulary and the batches."""

    directory: str  # the files' names are relative to it
    train_file: str
    dev_file: str | None = None
    # None is as usual (``data.tsv.read_pairs``).
    source_column: int | None = None
    target_column: int | None = None
    num_columns: int | None = None
    # Put before every source, as T5's tasks do ("summarize: ").
    source_prefix: str = ""
    # Of the texts that are written for the dev file's sources, where these are scored: a name
    # of ``data.metrics.METRICS``.
    metric: str = "bleu"
    # A SentencePiece model (FILE:100 adds T5's extra ids), or "bytes". None takes the
    # teacher's, or without a teacher trains one on the pairs, of the model's vocab_size.
    vocabulary: str | None = None
    vocabulary_pairs: int = 100_000  # sampled for training the vocabulary
    max_source_length: int = 96  # tokens, EOS included
    max_target_length: int = 96
    # Cut longer sources, as T5 does, instead of dropping their pairs.
    truncate_sources: bool = False
    buckets: Sequence[int] = DEFAULT_BUCKETS
    tokens_per_batch: int = 4096  # padded, of the longer side

    def __post_init__(self):
        metric_by_name(self.metric)

    @property
    def columns(self) -> dict[str, int | None]:
        """Keyword arguments for ``read_pairs``."""
        return {
            "source_column": self.source_column,
            "target_column": self.target_column,
            "num_columns": self.num_columns,
        }

    @property
    def train_name(self) -> str:
        """The train file."""
        return self.train_file

    @property
    def dev_name(self) -> str | None:
        """The dev file."""
        return self.dev_file

    @property
    def longest(self) -> tuple[int, int]:
        """As the options say."""
        return self.max_source_length, self.max_target_length

    def own_vocabulary(self, directory: Path, vocab_size: int) -> Vocabulary:
        """The vocabulary that was given, or trained earlier, or trained now."""
        if self.vocabulary:
            return _that_fits(self.vocabulary, vocab_size)
        name = directory / "vocabulary" / SPIECE_NAME
        if not name.is_file():
            say(f"training a vocabulary of {vocab_size} pieces")
            self._train_vocabulary(name, vocab_size)
        vocabulary = SentencePieceVocabulary(name)
        _check_fits(name, vocabulary, vocab_size)
        return vocabulary

    def _train_vocabulary(self, path: Path, vocab_size: int) -> None:
        pairs = list(read_pairs(Path(self.directory) / self.train_file, **self.columns))
        # A generator of its own: the sample does not depend on the training seed.
        sample = random.Random(0).sample(pairs, min(self.vocabulary_pairs, len(pairs)))
        # Trained aside and renamed, so that a kill leaves no half file behind.
        trained = train_sentencepiece(
            itertools.chain.from_iterable(sample),
            path.with_name("unfinished"),
            vocab_size,
        )
        trained.with_suffix(".vocab").replace(path.with_suffix(".vocab"))
        trained.replace(path)

    def train_batches(self, vocabulary: Vocabulary, cache_dir: Path, seed: int) -> Batches:
        """Of the train file; the tokens are kept in ``cache_dir``."""
        return make_batches(self, self.train_pairs(vocabulary, cache_dir, seed, None), seed)

    def train_pairs(
        self, vocabulary: Vocabulary, cache_dir: Path, seed: int, first: int | None
    ) -> TokenisedPairs:
        """The first pairs of the train file; the tokens are kept in ``cache_dir``."""
        del seed  # the file has its own order
        pairs = self._load(self.train_file, vocabulary, cache_dir)
        return pairs if first is None else pairs.first(first)

    def dev_pairs(
        self, vocabulary: Vocabulary, cache_dir: Path, first: int | None = None
    ) -> TokenisedPairs | None:
        """The first pairs of the dev file; the tokens are kept in ``cache_dir``."""
        if self.dev_file is None:
            return None
        pairs = self._load(self.dev_file, vocabulary, cache_dir)
        return pairs if first is None else pairs.first(first)

    def _load(self, name: str, vocabulary: Vocabulary, cache_dir: Path) -> TokenisedPairs:
        pairs = tokenise_file(
            Path(self.directory) / name,
            vocabulary,
            **self.columns,
            max_source_length=self.max_source_length,
            max_target_length=self.max_target_length,
            cache_dir=cache_dir,
            source_prefix=self.source_prefix,
            truncate_sources=self.truncate_sources,
        )
        _say_read(name, pairs)
        return pairs

    def evaluator(self, vocabulary: Vocabulary, directory: Path, examples: int | None) -> Evaluator:
        """By ``metric``; sources that are too long are cut, empty ones left out."""
        # Imported here: seqio brings TensorFlow along, seconds that others do not need.
        from spec_t5x.data.task_evaluator import TaskEvaluator, text_task

        pairs = read_pairs(Path(self.directory) / self.dev_file, **self.columns)
        pairs = ((self.source_prefix + source, target) for source, target in pairs if source)
        task = text_task(
            Path(self.dev_file).name.partition(".")[0],
            list(itertools.islice(pairs, examples)),
            vocabulary,
            metric_by_name(self.metric),
        )
        return TaskEvaluator([task], "validation", _by_side(self.longest), directory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskDataOptions(TaskOptions):
    """A seqio task or mixture by its name, the vocabulary and the batches."""

    mixture_or_task: str
    # Modules that register tasks when imported; the paper's tasks are known without.
    # T5X's macro holds one name or None.
    task_modules: tuple | str | None = ()
    # As T5X's macro: sources and targets are cut to so many tokens, EOS included.
    task_feature_lengths: dict | None = None
    train_split: str = "train"
    dev_split: str | None = "validation"
    # Take the first so many of each task's dev split; None takes all.
    dev_examples: int | None = None
    # A SentencePiece model (FILE:100 adds T5's extra ids), or "bytes". None takes that of the
    # teacher or the initial checkpoint. The tasks' own are not looked at.
    vocabulary: str | None = None
    buckets: Sequence[int] = DEFAULT_BUCKETS
    tokens_per_batch: int = 4096  # padded, of the longer side

    def __post_init__(self):
        self.check_lengths()
        if set(self.task_feature_lengths or ()) != {"inputs", "targets"}:
            raise InputError(
                f"task_feature_lengths is {self.task_feature_lengths}: give tokens of both sides, "
                "{'inputs': 512, 'targets': 128}"
            )
        if self.dev_examples is not None and self.dev_examples < 1:
            raise InputError(f"dev_examples is {self.dev_examples}: give at least 1")

    @property
    def train_name(self) -> str:
        """The task and its split."""
        return f"{self.mixture_or_task} ({self.train_split})"

    @property
    def dev_name(self) -> str | None:
        """The task and its split."""
        return self.dev_split and f"{self.mixture_or_task} ({self.dev_split})"

    @property
    def longest(self) -> tuple[int, int]:
        """As the options say."""
        return self.task_feature_lengths["inputs"], self.task_feature_lengths["targets"]

    def own_vocabulary(self, directory: Path, vocab_size: int) -> Vocabulary:
        """The vocabulary that was given.

        Raises:
            InputError: none was.
        """
        if not self.vocabulary:
            raise InputError(
                "TaskDataOptions.vocabulary is None: give a SentencePiece model, 'bytes', or an "
                "initial checkpoint, which has one"
            )
        return _that_fits(self.vocabulary, vocab_size)

    def task(self, vocabulary: Vocabulary) -> Any:
        """The task or mixture with the model's ids, a ``task_streams.PairedTask``.

        Raises:
            InputError: no such task, or one that cannot be trained on.
        """
        # Imported here: seqio brings TensorFlow along, seconds that a file does not need.
        from spec_t5x.data.task_streams import PairedTask

        return PairedTask(
            self.mixture_or_task,
            vocabulary,
            lengths=self.task_feature_lengths,
            modules=self.modules,
        )

    def train_batches(self, vocabulary: Vocabulary, cache_dir: Path, seed: int) -> Positioned:
        """A stream that mixes, shuffles and repeats as seqio does."""
        from spec_t5x.data.task_streams import TaskStream

        return TaskStream(
            self.task(vocabulary),
            split=self.train_split,
            buckets=self.buckets,
            tokens_per_batch=self.tokens_per_batch,
            seed=seed,
        )

    def train_pairs(
        self, vocabulary: Vocabulary, cache_dir: Path, seed: int, first: int | None
    ) -> TokenisedPairs:
        """The first pairs that ``train_batches`` would read; a mixture's epoch ends with the
        first of its tasks."""
        pairs = self.task(vocabulary).shuffled_pairs(self.train_split, seed, limit=first)
        _say_read(self.train_name, pairs)
        return pairs

    def dev_pairs(
        self, vocabulary: Vocabulary, cache_dir: Path, first: int | None = None
    ) -> TokenisedPairs | None:
        """The first pairs of each task's dev split, as many of each."""
        if self.dev_split is None:
            return None
        task, limit = self.task(vocabulary), self.dev_examples
        if first is not None:
            share = -(-first // len(task.tasks_with(self.dev_split)))
            limit = share if limit is None else min(share, limit)
        pairs = task.pairs(self.dev_split, limit=limit)
        _say_read(self.dev_name, pairs)
        return pairs if first is None else pairs.first(first)

    def evaluator(self, vocabulary: Vocabulary, directory: Path, examples: int | None) -> Evaluator:
        """By each task's own metrics, on its dev split."""
        from spec_t5x.data.task_evaluator import TaskEvaluator

        tasks = self.task(vocabulary).tasks_with(self.dev_split)
        lengths = self.task_feature_lengths
        return TaskEvaluator(tasks, self.dev_split, lengths, directory, examples)


for _settings in (DataOptions, TaskDataOptions):
    gin.external_configurable(_settings, module="spec_t5x")


def load_batches(
    data: TrainingData, vocabulary: Vocabulary, directory: Path, seed: int
) -> tuple[Batches | Positioned, Batches | None]:
    """What is trained on and what is held out; tokens are kept in ``directory/cache``."""
    cache_dir = directory / "cache"
    train_batches = data.train_batches(vocabulary, cache_dir, seed)
    if isinstance(train_batches, Batches):
        say(f"{train_batches.batches_per_epoch:,} batches an epoch")
    dev = data.dev_pairs(vocabulary, cache_dir)
    return train_batches, dev and make_batches(data, dev, seed)


def make_batches(data: TrainingData, pairs: TokenisedPairs, seed: int) -> Batches:
    """The batches of the data's pairs, or of others with the same sources."""
    return Batches(pairs, tokens_per_batch=data.tokens_per_batch, seed=seed, buckets=data.buckets)


def check_inherits_vocabulary(data: TrainingData) -> None:
    """Raises ``InputError`` where a vocabulary is given and the target's is to be taken."""
    if data.vocabulary is not None:
        raise InputError(
            f"{type(data).__name__}.vocabulary is {data.vocabulary!r}: leave it out, it is the "
            "target's"
        )


def _that_fits(name: str, vocab_size: int) -> Vocabulary:
    vocabulary = make_vocabulary(name, vocab_size)
    _check_fits(name, vocabulary, vocab_size)
    return vocabulary


def _check_fits(name: str | Path, vocabulary: Vocabulary, vocab_size: int) -> None:
    if vocabulary.vocab_size > vocab_size:
        raise InputError(
            f"{name} has {vocabulary.vocab_size} pieces, the model room for "
            f"{vocab_size}: raise T5Config.vocab_size"
        )


def _by_side(longest: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("inputs", "targets"), longest, strict=True))


def _say_read(name: str, pairs: TokenisedPairs) -> None:
    say(
        f"{name}: {len(pairs):,} pairs of {pairs.source_lengths.mean():.1f} and "
        f"{pairs.target_lengths.mean():.1f} tokens; {pairs.num_dropped:,} dropped "
        "(too long, or empty)"
    )
