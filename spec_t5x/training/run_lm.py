"""Trains a GPT on lines of text, as a gin file says.

    spec-t5x train-lm --gin_file=FILE.gin --gin.NAME=VALUE ...

The output directory gets what ``run`` puts there: ``vocabulary/`` (unless one is given),
``cache/``, ``checkpoints/``, ``metrics.jsonl`` and, at the end, ``model/``. Run the same
command again to go on after an interruption.
"""

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import gin

from spec_t5x.checkpoints.loading import load, load_vocabulary
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.data.batching import DEFAULT_BUCKETS, Batches, TokenisedPairs
from spec_t5x.data.lines import read_lines, tokenise_cached
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.data.wordpiece import TOKENIZER_NAME, WordPieceVocabulary, train_wordpiece
from spec_t5x.errors import InputError
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.gpt import GPTConfig
from spec_t5x.models.partitioning import param_shardings
from spec_t5x.training.language_model import init_state, make_eval_step, make_train_step
from spec_t5x.training.progress import say
from spec_t5x.training.run import OptimizerOptions, check_settings, export
from spec_t5x.training.trainer import TrainOptions, TrainResult, make_layout, run_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The lines, the vocabulary and the batches. Lines are from files or from a seqio task."""

    directory: str = "."  # the files' names are relative to it
    # Plain text or tab-separated, gzipped or not; each line one example.
    train_files: Sequence[str] = ()
    dev_files: Sequence[str] = ()
    columns: Sequence[int] = (0,)
    num_columns: int = 1
    # A task, its splits (None holds nothing out), and the feature that is the text.
    task: str | None = None
    task_modules: Sequence[str] = ()
    task_feature: str = "text"
    train_split: str = "train"
    dev_split: str | None = None
    train_limit: int | None = None  # the first so many lines
    # A tokenizer.json, or a model whose vocabulary to take. None takes the teacher's, or
    # without a teacher trains a WordPiece vocabulary of the model's vocab_size.
    vocabulary: str | None = None
    vocabulary_lines: int = 400_000  # sampled for training the vocabulary
    max_length: int = 128  # tokens, EOS included
    buckets: Sequence[int] = DEFAULT_BUCKETS
    tokens_per_batch: int = 2048  # padded

    def __post_init__(self):
        for name in ("train_files", "dev_files", "task_modules"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if bool(self.train_files) == bool(self.task):
            raise InputError(
                f"train_files are {self.train_files} and task {self.task!r}: give one of them"
            )
        if max(self.buckets) < self.max_length:
            raise InputError(
                f"max_length is {self.max_length} and the largest bucket {max(self.buckets)}: add "
                "a bucket or lower max_length"
            )

    def read(self, part: str) -> Iterator[str]:
        """The lines of "train" or "dev".

        Raises:
            InputError: files or a task that cannot be read.
        """
        limit = self.train_limit if part == "train" else None
        if not self.task:
            columns = {"columns": self.columns, "num_columns": self.num_columns}
            return read_lines(self._files(part), **columns, limit=limit)
        # Slow to import, and of no use to files.
        from spec_t5x.data.task_lines import read_task_lines

        return read_task_lines(
            self.task,
            self._split(part),
            feature=self.task_feature,
            modules=self.task_modules,
            limit=limit,
        )

    def tokenise(self, part: str, vocabulary: Vocabulary, cache_dir: Path) -> TokenisedPairs | None:
        """The lines of "train" or "dev" as ids; None where nothing is held out."""
        if part == "dev" and not (self._split(part) if self.task else self.dev_files):
            return None
        of_task = (self.task, self._split(part), self.task_feature, self.task_modules)
        key = of_task if self.task else (tuple(self.columns), self.num_columns)
        return tokenise_cached(
            self.read(part),
            vocabulary,
            self.max_length,
            key=(*key, self.train_limit if part == "train" else None),
            files=self._files(part),
            cache_dir=cache_dir,
        )

    def _files(self, part: str) -> list[Path]:
        names = self.train_files if part == "train" else self.dev_files
        return [Path(self.directory) / name for name in names]

    def _split(self, part: str) -> str | None:
        return self.train_split if part == "train" else self.dev_split


for _settings in (GPTConfig, TextOptions):
    gin.external_configurable(_settings, module="spec_t5x")


@gin.configurable
def train_lm(
    *,
    output_dir: str,
    model: GPTConfig,
    data: TextOptions,
    optimizer: OptimizerOptions,
    options: TrainOptions,
    teacher: str | None = None,
    export_dtype: str = "bfloat16",
) -> TrainResult:
    """Trains, evaluates and exports.

    Args:
        output_dir: made if absent; training goes on from what it holds.
        model: sizes; its vocab_size must hold the vocabulary, its positions the lines.
        data, optimizer, options: see the classes.
        teacher: a language model whose distributions the new one learns (word-level
            distillation) and whose vocabulary it takes over.
        export_dtype: of the exported parameters, 'bfloat16' or 'float32'.

    Raises:
        InputError: files, vocabulary, teacher or settings that cannot be used.
    """
    if data.max_length > model.max_length:
        raise InputError(
            f"lines have up to {data.max_length} tokens and the model {model.max_length} "
            "positions: raise GPTConfig.max_length or lower TextOptions.max_length"
        )
    directory = Path(output_dir)
    check_settings(optimizer, options, export_dtype, directory / "model")
    directory.mkdir(parents=True, exist_ok=True)
    loaded = _load_teacher(teacher, model, data.max_length) if teacher else None
    vocabulary = _vocabulary(data, directory, model.vocab_size, loaded)
    train_batches, dev_batches = load_batches(data, vocabulary, directory, options.seed)
    transformation, schedule = optimizer.build(options.steps)
    layout = make_layout(options, lambda mesh: param_shardings(model, mesh))
    result = run_steps(
        init_state(model, transformation, options.seed, layout),
        make_train_step(model, transformation, options, loaded and loaded.config),
        make_eval_step(model),
        schedule,
        train_batches,
        dev_batches,
        options,
        directory,
        frozen=loaded and layout.frozen(loaded.params, loaded.config),
        layout=layout,
    )
    figures = {}
    if result.dev is not None:
        figures["perplexity"] = result.dev.perplexity
        say(f"dev perplexity {result.dev.perplexity:.2f}")
    export(result, directory / "model", model, vocabulary, export_dtype, **figures)
    return result


def load_batches(
    data: TextOptions, vocabulary: Vocabulary, directory: Path, seed: int
) -> tuple[Batches, Batches | None]:
    """The tokenised training and held-out lines; the tokens are kept in ``directory/cache``."""

    def batches(kind, lines):
        say(
            f"{kind}: {len(lines):,} lines of {lines.target_lengths.mean():.1f} tokens; "
            f"{lines.num_dropped:,} dropped (too long)"
        )
        return Batches(
            lines, tokens_per_batch=data.tokens_per_batch, seed=seed, buckets=data.buckets
        )

    train = batches("train", data.tokenise("train", vocabulary, directory / "cache"))
    say(f"{train.batches_per_epoch:,} batches an epoch")
    dev = data.tokenise("dev", vocabulary, directory / "cache")
    return train, dev and batches("dev", dev)


def _load_teacher(name: str, model: GPTConfig, max_length: int) -> LoadedModel:
    loaded = load(name, dtype=resolve_dtype("auto"))
    if not isinstance(loaded.config, GPTConfig):
        raise InputError(f"the teacher {name} is no language model: give one that train-lm trained")
    if loaded.config.vocab_size != model.vocab_size:
        raise InputError(
            f"the teacher's vocab_size is {loaded.config.vocab_size}, the model's "
            f"{model.vocab_size}: make them equal"
        )
    if loaded.config.max_length < max_length:
        raise InputError(
            f"the teacher has {loaded.config.max_length} positions and TextOptions.max_length is "
            f"{max_length}: lower it"
        )
    return loaded


def _vocabulary(
    data: TextOptions, directory: Path, vocab_size: int, teacher: LoadedModel | None
) -> Vocabulary:
    """The vocabulary that was given, or the teacher's, or trained earlier, or trained now."""
    if data.vocabulary:
        is_file = Path(data.vocabulary).is_file()
        read = WordPieceVocabulary if is_file else load_vocabulary
        vocabulary = read(data.vocabulary)
        if teacher and vocabulary.fingerprint() != teacher.vocabulary.fingerprint():
            raise InputError(
                f"TextOptions.vocabulary {data.vocabulary!r} is not the teacher's: leave it out"
            )
    elif teacher:
        return teacher.vocabulary
    else:
        path = directory / "vocabulary" / TOKENIZER_NAME
        if not path.is_file():
            say(f"training a vocabulary of {vocab_size} pieces")
            train_wordpiece(_sample(data.read("train"), data.vocabulary_lines), path, vocab_size)
        vocabulary = WordPieceVocabulary(path)
    if vocabulary.vocab_size > vocab_size:
        raise InputError(
            f"the vocabulary has {vocabulary.vocab_size} pieces, the model room for "
            f"{vocab_size}: raise GPTConfig.vocab_size"
        )
    return vocabulary


def _sample(texts: Iterable[str], size: int) -> list[str]:
    """So many of the texts, each as likely as any other, without keeping them all."""
    # A generator of its own: the sample does not depend on the training seed.
    chance, sample = random.Random(0), []
    for number, text in enumerate(texts):
        if number < size:
            sample.append(text)
        elif (place := chance.randrange(number + 1)) < size:
            sample[place] = text
    return sample
