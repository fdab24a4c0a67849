"""Trains a T5 on a tab-separated file of text pairs or a seqio task, as a gin file says.

    spec-t5x train --gin_file=FILE.gin --gin.NAME=VALUE ...

The output directory gets ``vocabulary/`` (unless one is given), ``cache/`` (the
tokenised pairs of a file), ``checkpoints/``, ``metrics.jsonl``, ``predictions/`` (where
texts are scored) and, at the end, ``model/``, which
``spec_t5x.checkpoints.loading.load`` reads. Run the same command again to go on after
an interruption.
"""

import dataclasses
from pathlib import Path

import gin
import optax

from spec_t5x.checkpoints.loading import check_same_vocabulary, load
from spec_t5x.checkpoints.own.directory import check_stored_dtype
from spec_t5x.checkpoints.own.native import save_model
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, check_destination
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.checkpoints.storage.vocabularies import VocabularyLike
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.binding import ModelConfig
from spec_t5x.models.t5 import T5Config
from spec_t5x.training import model_sizes  # noqa: F401, gin knows T5Config by it
from spec_t5x.training.layout import count_replicas
from spec_t5x.training.optimizers import make_optimizer
from spec_t5x.training.progress import say
from spec_t5x.training.run_data import TrainingData, load_batches
from spec_t5x.training.schedules import Schedule, make_schedule
from spec_t5x.training.text_metrics import MetricsOptions, TextMetrics
from spec_t5x.training.trainer import Teacher, TrainOptions, TrainResult, fit


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


def check_settings(
    optimizer: OptimizerOptions, options: TrainOptions, export_dtype: str, exported: Path
) -> None:
    """What would end a training that has begun, said before anything is read for it.

    Raises:
        InputError: a schedule longer than the training, too few devices, an optimizer or type
            that is not known, or something in the place of what is exported.
    """
    check_stored_dtype(export_dtype)
    check_destination(exported, overwrite=True, marks=(CONFIG_NAME,))
    optimizer.build(options.steps)
    count_replicas(options.data_parallel, options.model_parallel)


for _settings in (TrainOptions, OptimizerOptions):
    gin.external_configurable(_settings, module="spec_t5x")


@gin.configurable
def train(
    *,
    output_dir: str,
    model: T5Config,
    data: TrainingData,
    optimizer: OptimizerOptions,
    options: TrainOptions,
    teacher: str | None = None,
    initial_checkpoint: str | None = None,
    export_dtype: str = "bfloat16",
    metrics: MetricsOptions | None = None,
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
        metrics: scores the texts that the model writes for what is held out; None does not.

    Raises:
        InputError: files, vocabulary, teacher or settings that cannot be used.
    """
    directory = Path(output_dir)
    check_settings(optimizer, options, export_dtype, directory / "model")
    directory.mkdir(parents=True, exist_ok=True)
    initial = load_initial(initial_checkpoint, data.vocabulary, model)
    loaded_teacher = _load_teacher(teacher, data.vocabulary, model) if teacher else None
    if initial and loaded_teacher:
        check_same_vocabulary(loaded_teacher, initial)
    inherited = loaded_teacher or initial
    vocabulary = (
        inherited.vocabulary if inherited else data.own_vocabulary(directory, model.vocab_size)
    )
    train_batches, dev_batches = load_batches(data, vocabulary, directory, options.seed)
    scorer = metrics and _scorer(metrics, data, model, vocabulary, directory, export_dtype)
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
        scorer=scorer,
    )
    export(result, directory / "model", model, vocabulary, export_dtype)
    return result


def _scorer(
    metrics: MetricsOptions,
    data: TrainingData,
    model: T5Config,
    vocabulary: Vocabulary,
    directory: Path,
    export_dtype: str,
) -> TextMetrics:
    if data.dev_name is None:
        raise InputError(
            "train.metrics are of held-out texts and there are none: give a dev file or split, or "
            "leave train.metrics out"
        )
    return TextMetrics(
        data.evaluator(vocabulary, directory, metrics.examples),
        model,
        vocabulary,
        metrics,
        longest=data.longest,
        export_dtype=export_dtype,
    )


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
    if result.metrics is not None:
        extra["metrics"] = result.metrics
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
