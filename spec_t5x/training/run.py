"""Trains a T5 on a tab-separated file of text pairs, as a gin file says.

    spec-t5x train --gin_file=FILE.gin --gin.NAME=VALUE ...

The output directory gets ``vocabulary/`` (unless one is given), ``cache/`` (the
tokenised pairs), ``checkpoints/``, ``metrics.jsonl`` and, at the end, ``model/``,
which ``spec_t5x.checkpoints.native.load_model`` reads. Run the same command again
to go on after an interruption.
"""

import dataclasses
import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import gin
import optax

from spec_t5x.checkpoints.loaded_model import LoadedModel
from spec_t5x.checkpoints.loading import check_same_vocabulary, load
from spec_t5x.checkpoints.native import save_model
from spec_t5x.checkpoints.vocabularies import VocabularyLike, make_vocabulary
from spec_t5x.data.batching import DEFAULT_BUCKETS, Batches, TokenisedPairs, tokenise_file
from spec_t5x.data.tsv import read_pairs
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    SentencePieceVocabulary,
    Vocabulary,
    train_sentencepiece,
)
from spec_t5x.errors import InputError
from spec_t5x.generation import GenerateOptions, Generator
from spec_t5x.models.binding import ModelConfig
from spec_t5x.models.t5 import T5Config
from spec_t5x.platform_dtype import resolve_dtype
from spec_t5x.training.evaluate import translation_bleu
from spec_t5x.training.optimizers import make_optimizer
from spec_t5x.training.schedules import Schedule, make_schedule
from spec_t5x.training.trainer import Teacher, TrainOptions, TrainResult, fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The pairs, the vocabulary and the batches."""

    directory: str  # the files' names are relative to it
    train_file: str
    dev_file: str | None = None
    source_column: int = 0
    target_column: int = 1
    num_columns: int = 2
    # Put before every source, as T5's tasks do ("summarize: ").
    source_prefix: str = ""
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

    @property
    def columns(self) -> dict[str, int]:
        """Keyword arguments for ``read_pairs``."""
        return {
            "source_column": self.source_column,
            "target_column": self.target_column,
            "num_columns": self.num_columns,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Arguments of ``make_optimizer`` and ``make_schedule``."""

    name: str = "adamw"
    learning_rate: float = 1e-3
    warmup_steps: int = 1000
    decay: str = "constant"
    cooldown_steps: int = 0
    clip_norm: float = 1.0
    weight_decay: float = 0.0

    def build(self, steps: int) -> tuple[optax.GradientTransformation, Schedule]:
        """The optimizer and its schedule, for a training of so many steps."""
        schedule = make_schedule(
            peak=self.learning_rate,
            steps=steps,
            warmup_steps=self.warmup_steps,
            decay=self.decay,
            cooldown_steps=self.cooldown_steps,
        )
        return make_optimizer(
            self.name, schedule, clip_norm=self.clip_norm, weight_decay=self.weight_decay
        ), schedule


for _settings in (T5Config, TrainOptions, DataOptions, OptimizerOptions):
    gin.external_configurable(_settings, module="spec_t5x")


@gin.configurable
def train(
    *,
    output_dir: str,
    model: T5Config,
    data: DataOptions,
    optimizer: OptimizerOptions,
    options: TrainOptions,
    teacher: str | None = None,
    initial_checkpoint: str | None = None,
    export_dtype: str = "bfloat16",
    bleu_pairs: int = 0,
) -> TrainResult:
    """Trains, evaluates and exports.

    Args:
        output_dir: made if absent; training goes on from what it holds.
        model: sizes; its vocab_size must hold the vocabulary.
        data, optimizer, options: see the classes.
        teacher: a checkpoint of any format, whose distributions the new model learns
            (word-level distillation) and whose vocabulary it takes over; one that holds
            no vocabulary, as T5X's, has that of ``data``.
        initial_checkpoint: a model of these very sizes to go on from, of any format; its
            vocabulary is taken over unless there is a teacher, as a teacher's is.
        export_dtype: of the exported parameters, 'bfloat16' or 'float32'.
        bleu_pairs: of the first so many dev pairs, BLEU is reported at the end.

    Raises:
        InputError: files, vocabulary, teacher or settings that cannot be used.
    """
    directory = Path(output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    initial = load_initial(initial_checkpoint, data.vocabulary, model)
    loaded_teacher = _load_teacher(teacher, data.vocabulary, model) if teacher else None
    if initial and loaded_teacher:
        check_same_vocabulary(loaded_teacher, initial)
    inherited = loaded_teacher or initial
    vocabulary = (
        inherited.vocabulary if inherited else _vocabulary(data, directory, model.vocab_size)
    )
    train_batches, dev_batches = load_batches(data, vocabulary, directory, options.seed)
    transformation, schedule = optimizer.build(options.steps)
    result = fit(
        model,
        transformation,
        schedule,
        train_batches,
        dev_batches,
        options,
        directory,
        loaded_teacher and Teacher(config=loaded_teacher.config, params=loaded_teacher.params),
        initial and initial.params,
    )
    export(result, directory / "model", model, vocabulary, export_dtype)
    if bleu_pairs and data.dev_file:
        _report_bleu(directory / "model", data, bleu_pairs)
    return result


def _vocabulary(data: DataOptions, directory: Path, vocab_size: int) -> Vocabulary:
    """The vocabulary that was given, or trained earlier, or trained now."""
    if data.vocabulary:
        name, vocabulary = data.vocabulary, make_vocabulary(data.vocabulary, vocab_size)
    else:
        name = directory / "vocabulary" / SPIECE_NAME
        if not name.is_file():
            say(f"training a vocabulary of {vocab_size} pieces")
            _train_vocabulary(data, name, vocab_size)
        vocabulary = SentencePieceVocabulary(name)
    if vocabulary.vocab_size > vocab_size:
        raise InputError(
            f"{name} has {vocabulary.vocab_size} pieces, the model room for "
            f"{vocab_size}: raise T5Config.vocab_size"
        )
    return vocabulary


def _train_vocabulary(data: DataOptions, path: Path, vocab_size: int) -> None:
    pairs = list(read_pairs(Path(data.directory) / data.train_file, **data.columns))
    # A generator of its own: the sample does not depend on the training seed.
    sample = random.Random(0).sample(pairs, min(data.vocabulary_pairs, len(pairs)))
    # Trained aside and renamed, so that a kill leaves no half file behind.
    trained = train_sentencepiece(
        itertools.chain.from_iterable(sample),
        path.with_name("unfinished"),
        vocab_size,
    )
    trained.with_suffix(".vocab").replace(path.with_suffix(".vocab"))
    trained.replace(path)


def load_batches(
    data: DataOptions, vocabulary: Vocabulary, directory: Path, seed: int
) -> tuple[Batches, Batches | None]:
    """The tokenised training and dev files; the tokens are kept in ``directory/cache``."""

    def load(name: str) -> Batches:
        return make_batches(data, load_pairs(data, name, vocabulary, directory), seed)

    train_batches = load(data.train_file)
    say(f"{train_batches.batches_per_epoch:,} batches an epoch")
    return train_batches, load(data.dev_file) if data.dev_file else None


def load_pairs(
    data: DataOptions, name: str, vocabulary: Vocabulary, directory: Path
) -> TokenisedPairs:
    """A tokenised file; the tokens are kept in ``directory/cache``."""
    pairs = tokenise_file(
        Path(data.directory) / name,
        vocabulary,
        **data.columns,
        max_source_length=data.max_source_length,
        max_target_length=data.max_target_length,
        cache_dir=directory / "cache",
        source_prefix=data.source_prefix,
        truncate_sources=data.truncate_sources,
    )
    say(
        f"{name}: {len(pairs):,} pairs of {pairs.source_lengths.mean():.1f} and "
        f"{pairs.target_lengths.mean():.1f} tokens; {pairs.num_dropped:,} dropped "
        "(too long, or empty)"
    )
    return pairs


def make_batches(data: DataOptions, pairs: TokenisedPairs, seed: int) -> Batches:
    """The batches of a file's pairs, or of others with the same sources."""
    return Batches(pairs, tokens_per_batch=data.tokens_per_batch, seed=seed, buckets=data.buckets)


def _load_teacher(name: str, vocabulary: str | None, model: T5Config) -> LoadedModel:
    # It is only read: the type that the platform is quick in, half the memory on a TPU.
    loaded = encoder_decoder(load(name, vocabulary=vocabulary, dtype=resolve_dtype("auto")))
    if loaded.config.vocab_size != model.vocab_size:
        raise InputError(
            f"the teacher's vocab_size is {loaded.config.vocab_size}, the model's "
            f"{model.vocab_size}: make them equal"
        )
    return loaded


def encoder_decoder(loaded: LoadedModel) -> LoadedModel:
    """The model itself, if it is a T5.

    Raises:
        InputError: it is a decoder alone.
    """
    if not isinstance(loaded.config, T5Config):
        raise InputError(f"{loaded.directory} is a decoder alone: give an encoder-decoder")
    return loaded


def load_initial(
    name: str | None, vocabulary: VocabularyLike | None, model: T5Config
) -> LoadedModel | None:
    """The model to go on from, in float32."""
    if name is None:
        return None
    loaded = encoder_decoder(load(name, vocabulary=vocabulary, dtype="float32"))
    for field in dataclasses.fields(T5Config):
        ours, theirs = getattr(model, field.name), getattr(loaded.config, field.name)
        # Dropout is the training's own choice.
        if ours != theirs and field.name not in ("dropout_rate", "dtype"):
            raise InputError(
                f"{name} has {field.name} {theirs}, the model to train {ours}: make "
                f"T5Config.{field.name} {theirs}"
            )
    return loaded


def _report_bleu(model: Path, data: DataOptions, num_pairs: int) -> None:
    """BLEU of what was exported, decoded greedily; too long sources are cut."""
    generator = Generator.load(model)
    options = GenerateOptions(
        batch_size=32,
        max_source_len=data.max_source_length,
        max_decode_len=data.max_target_length,
        truncate=True,
    )
    pairs = read_pairs(Path(data.directory) / data.dev_file, **data.columns)
    pairs = ((data.source_prefix + source, target) for source, target in pairs if source)

    def decode(texts):
        return [outputs[0].output for outputs in generator.generate(texts, options)]

    score = translation_bleu(decode, itertools.islice(pairs, num_pairs))
    say(f"dev BLEU {score.score:.2f} of {score.num_sentences} pairs ({score.signature})")


def export(
    result: TrainResult,
    directory: Path,
    model: ModelConfig,
    vocabulary: Vocabulary,
    dtype: str,
    **more: float,
) -> None:
    """Saves what was trained, with its step, its figures on held-out text and ``more``."""
    extra = {"step": int(result.state.step), **more}
    if result.dev is not None:
        extra |= dataclasses.asdict(result.dev)
    save_model(
        directory,
        result.state.params,
        model,
        vocabulary,
        dtype=dtype,
        extra=extra,
        overwrite=True,  # an earlier, shorter run's
    )
    ending = "finished" if result.finished else "out of time"
    say(f"{ending} at step {int(result.state.step)}; model in {directory}")


def say(text: str) -> None:
    """Tells whoever watches the run."""
    print(text, file=sys.stderr, flush=True)
