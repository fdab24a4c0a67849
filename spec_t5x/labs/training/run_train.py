"""Trains a T5 on text pairs, or a language model on lines, configured by a gin file.

    spec-t5x train --gin_file=FILE.gin --gin.NAME=VALUE ...

The output directory gets ``vocabulary/`` (if one is trained), ``checkpoints/``, ``run.json``,
``metrics.jsonl``, ``predictions/`` (if outputs are scored) and, at the end, ``model/`` in this
package's format (``checkpoints.native``). The same command resumes a run that was interrupted.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import gin

from spec_t5x import registry
from spec_t5x.checkpoints.digests import files_digest
from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.storage.files import check_destination
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.checkpoints.storage.vocabularies import VocabularyLike
from spec_t5x.errors import InputError, check_choice, check_unused
from spec_t5x.labs.metrics import check_installed, metric_by_name
from spec_t5x.labs.training.exports import save_model
from spec_t5x.labs.training.growth import GROWING, check_growth, grown
from spec_t5x.labs.training.interfaces import TrainOptions
from spec_t5x.labs.training.layout import Layout, count_replicas
from spec_t5x.labs.training.learners import Network
from spec_t5x.labs.training.optimizers import OptimizerOptions
from spec_t5x.labs.training.run_data import TrainingData, kinds_of_data
from spec_t5x.labs.training.same_run import FREE, held_run, network_settings
from spec_t5x.labs.training.text_metrics import MetricsOptions, TextMetrics
from spec_t5x.labs.training.trainer import TrainResult, fit
from spec_t5x.labs.training.training_log import curves_writer
from spec_t5x.machine.paths import expanded
from spec_t5x.models.sizes import size as published_size
from spec_t5x.models.t5 import NetworkConfig, T5Config, check_names
from spec_t5x.names import NATIVE_DTYPES

log = logging.getLogger(__name__)

# Importing contrib's kinds of data registers them with gin.
kinds_of_data()
# Gin's ``T5Config`` is ``t5_config`` below, which has a size.
_FAMILIES = [family.config for family in registry.find_all("family").values()]
for _settings in (TrainOptions, OptimizerOptions, *_FAMILIES):
    if _settings is not T5Config:
        gin.external_configurable(_settings, module="spec_t5x")


@gin.configurable("T5Config", module="spec_t5x")
def t5_config(size: str = "t5_1_0_small", **changes) -> T5Config:
    """Returns the configuration of a published size, with the fields in ``changes`` replaced.

    Raises:
        InputError: the size or a field is unknown.
    """
    config = published_size(size)
    check_names(type(config), changes, type(config).__name__.removesuffix("Config"))
    return dataclasses.replace(config, **changes)


@gin.configurable
def train(
    *,
    output_dir: str,
    model: NetworkConfig,
    data: TrainingData,
    optimizer: OptimizerOptions,
    options: TrainOptions,
    initial_checkpoint: str | None = None,
    grow: bool = False,
    export_dtype: str = "bfloat16",
    metrics: MetricsOptions | None = None,
) -> TrainResult:
    """Trains, evaluates and exports a model.

    Args:
        output_dir: created if absent; if it has checkpoints, the run resumes from the newest.
        model: configuration of the network; its vocab_size is at least the vocabulary's.
        data: text pairs, or lines for a model that has no source.
        initial_checkpoint: a model to start from, of any format, with the sizes of ``model``;
            its vocabulary is used.
        grow: the checkpoint may be smaller; it grows to the sizes of ``model`` (``growth``).
        export_dtype: dtype of the exported parameters, 'bfloat16', 'float32' or 'int8'
            (``checkpoints.native.rounded``).
        metrics: options of scoring generated texts of held-out sources; None scores none.

    Raises:
        InputError: files, vocabulary or settings cannot be used.
    """
    directory = expanded(output_dir)
    exported = directory / "model"
    check_settings(optimizer, options, export_dtype, exported)
    check_kind(model, data, options)
    _check_metrics(data, metrics)
    check_unused(options, "only drafts learn from a target", "objective", "distillation_weight")
    if grow and initial_checkpoint is None:
        raise InputError("train.grow has no model to grow: give train.initial_checkpoint")
    data.check_readable()
    initial = load_initial(initial_checkpoint, data.vocabulary, model, options, grow=grow)
    started = initial and files_digest(initial_checkpoint, str(directory))["content"]
    with held_run(directory, {"model": network_settings(model), "initial checkpoint": started}):
        vocabulary = (
            initial.vocabulary if initial else data.own_vocabulary(directory, model.vocab_size)
        )
        scorer = metrics and TextMetrics(
            sets=data.scored(vocabulary, metrics.examples),
            directory=directory,
            config=model,
            vocabulary=vocabulary,
            options=metrics,
            longest=data.longest,
            export_dtype=export_dtype,
        )
        result = fit(
            Network(model, options),
            *optimizer.build(options.steps),
            *data.train_and_dev(vocabulary, options.seed),
            directory,
            initial_params=initial and initial.params,
            scorer=scorer,
            export_dtype=export_dtype,
        )
        figures = figures_of(result, with_perplexity=not model.has_source) | data.stored
        # Replaces the export of an earlier, shorter run.
        export = {"dtype": export_dtype, "extra": figures, "overwrite": True}
        save_model(exported, result.state.params, model, vocabulary, **export)
    log_exported(result, f"model in {exported}")
    return result


def _check_metrics(data: TrainingData, metrics: MetricsOptions | None) -> None:
    """Raises ``InputError`` if there is no text to score, or a metric is unused or uninstalled."""
    if metrics and data.name("dev") is None:
        raise InputError(
            "train.metrics score held-out texts and there are none: give a dev file or split, or "
            "leave train.metrics out"
        )
    if hasattr(data, "metric"):
        if metrics:
            check_installed([metric_by_name(data.metric)])
        else:
            check_unused(data, "train.metrics is None, which scores no texts", "metric")


def check_settings(
    optimizer: OptimizerOptions, options: TrainOptions, export_dtype: str, exported: Path
) -> None:
    """Checks the settings that do not depend on data, before data are read.

    Raises:
        InputError: the schedule is longer than the training, the devices do not fit, the
            optimizer or dtype is unknown, ``exported`` has files that are no export, or what
            TensorBoard's curves need is not installed.
    """
    check_choice("stored dtype", export_dtype, NATIVE_DTYPES)
    check_destination(exported, overwrite=True)
    optimizer.build(options.steps)
    count_replicas(options.data_parallel, options.model_parallel)
    if options.tensorboard:
        curves_writer()


def check_kind(config: NetworkConfig, data: TrainingData, options: TrainOptions) -> None:
    """Raises ``InputError`` if the data or the label smoothing do not fit the network."""
    kind, given = type(config).__name__, type(data).__name__
    if config.has_source != data.has_source:
        every = kinds_of_data().items()
        fitting = [name for name, each in every if each.has_source == config.has_source]
        raise InputError(f"the data of a {kind} are {given}: give {' or '.join(fitting)}")
    most = getattr(config, "max_length", None)
    if most is not None and data.longest[1] > most:
        raise InputError(
            f"lines have up to {data.longest[1]} tokens and the model {most} positions: raise "
            f"{kind}.max_length or lower {given}.max_length"
        )
    if options.label_smoothing and (config.added_rows or not config.has_source):
        # Label smoothing averages all logits, and those of ids that are never generated are masked.
        raise InputError(
            f"label_smoothing is {options.label_smoothing}: leave it 0 for a language model, and "
            "for a model with added rows, whose logits are masked"
        )


def load_initial(
    name: str | None,
    vocabulary: VocabularyLike | None,
    model: NetworkConfig,
    options: TrainOptions,
    *,
    grow: bool = False,
) -> LoadedModel | None:
    """Loads the checkpoint ``name``, if any, in float32, and grows it to ``model``'s sizes.

    The parameters are sharded over the devices of ``options``; those that have grown are not.

    Raises:
        InputError: a setting of the checkpoint differs; with ``grow``, one that cannot grow.
    """
    if name is None:
        return None
    shardings = Layout.create(options.data_parallel, options.model_parallel).shardings
    loaded = load(name, vocabulary=vocabulary, dtype="float32", shardings=shardings)
    if type(loaded.config) is not type(model):
        raise InputError(
            f"{name} is a {type(loaded.config).__name__}, and the model to train a "
            f"{type(model).__name__}: give a checkpoint of its kind"
        )
    free = (*FREE, *(GROWING if grow else ()))
    for field in dataclasses.fields(model):
        ours, theirs = getattr(model, field.name), getattr(loaded.config, field.name)
        if ours != theirs and field.name not in free:
            raise InputError(
                f"{name} has {field.name} {theirs}, the model to train {ours}: make "
                f"{type(model).__name__}.{field.name} {theirs}"
            )
    if not grow:
        return loaded
    check_growth(name, loaded.config, model)
    params = grown(loaded.params, loaded.config, model)
    return dataclasses.replace(loaded, params=params, config=model)


def figures_of(result: TrainResult, with_perplexity: bool = False) -> dict[str, Any]:
    """Returns a run's step, held-out figures and scores, which the exported model stores."""
    figures = {"step": int(result.state.step)}
    for each in result.dev:
        figures |= dataclasses.asdict(each)
        if with_perplexity:
            figures["perplexity"] = each.perplexity
    return figures if result.metrics is None else figures | {"metrics": result.metrics}


def log_exported(result: TrainResult, exported: str) -> None:
    """Logs the end of a run: its last step, the place ``exported``, and the best step's figures."""
    ending = "finished" if result.finished else "out of time"
    log.info(f"{ending} at step {int(result.state.step)}; {exported}")
    if result.best:
        log.info(f"the best was step {result.best.step}:")
        for each in result.best.dev:
            log.info(f"  {each}")
