"""Trains a draft for a target, configured by a gin file.

    spec-t5x distill --gin_file=FILE.gin --gin.NAME=VALUE ...

The output directory gets ``cache/`` (the target's outputs), ``checkpoints/``, ``run.json``,
``metrics.jsonl`` and, at the end, ``draft/``: the draft of the highest alpha on held-out data, for
``--draft``. The same command resumes a run that was interrupted.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import gin
import jax
import jax.numpy as jnp

from spec_t5x.checkpoints.digests import files_digest
from spec_t5x.checkpoints.loading import check_same_vocabulary, load
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.errors import InputError, check_at_least, check_choice, check_unused
from spec_t5x.generation import Generator
from spec_t5x.labs.training.batching import Batches, TokenisedPairs
from spec_t5x.labs.training.distill import DistillOptions, DraftLearner
from spec_t5x.labs.training.exports import save_model, save_shared_draft
from spec_t5x.labs.training.first_head import first_head, head_config
from spec_t5x.labs.training.interfaces import TrainOptions
from spec_t5x.labs.training.kept_layers import check_number, keep_layers, kept_layers, likeliest_ids
from spec_t5x.labs.training.layout import Layout
from spec_t5x.labs.training.learners import Network
from spec_t5x.labs.training.optimizers import OptimizerOptions
from spec_t5x.labs.training.run_data import TrainingData
from spec_t5x.labs.training.run_train import check_kind, check_settings, load_initial, log_exported
from spec_t5x.labs.training.same_run import digest, held_run, network_settings
from spec_t5x.labs.training.student import Student
from spec_t5x.labs.training.target_outputs import SampleOptions, sample_targets
from spec_t5x.labs.training.trainer import Best, TrainResult, fit
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.machine.paths import expanded
from spec_t5x.models.eagle import EagleConfig
from spec_t5x.models.shared_params import own_params
from spec_t5x.models.t5 import NetworkConfig, T5Config
from spec_t5x.names import STORED_DTYPES
from spec_t5x.options import check_types

# The rule for an encoder that makes the draft use the target's, without training it.
SHARED = "shared"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptLayers:
    """Options of a draft made of layers of its target; rules are those of ``kept_layers``."""

    decoder: str = "every:2"
    # A rule ("all", "first:K", "last:K", "every:K"), or "shared": the draft uses the target's
    # encoder, embedding and cross-attention projections to keys and values, which are frozen.
    encoder: str = SHARED
    # With a shared encoder: the number of tokens that the output layer has, the most frequent ones
    # of the training texts. None keeps all tokens.
    draft_vocab_size: int | None = None
    # With a shared encoder: the number of drafting steps that an EAGLE head (``models/eagle.py``)
    # learns, a draft that continues from the target's states. 0 makes no head.
    unrolled_steps: int = 0
    # Width of an EAGLE head's states; None is the target's. A narrower head is faster, and starts
    # with random parameters.
    width: int | None = None
    # Target decoder layers, from 0, whose outputs an EAGLE head reads besides the last layer's.
    depths: tuple = ()
    # Says whether an EAGLE head attends to the source.
    reads_source: bool = True
    dropout_rate: float = 0.0

    def __post_init__(self):
        check_types(self)
        check_at_least(self, unrolled_steps=0)
        if self.encoder != SHARED:
            why = f"encoder {self.encoder!r}, and it needs the {SHARED!r} encoder"
            check_unused(self, why, "unrolled_steps", "draft_vocab_size")
        if not self.unrolled_steps:
            why = "unrolled_steps 0, and only drafts that continue from the target's states have it"
            check_unused(self, why, "width", "depths", "reads_source")

    def of(self, target: NetworkConfig) -> tuple[int, ...]:
        """Returns the indices, from 0, of the target's decoder layers that the draft keeps."""
        return kept_layers(self.decoder, target.num_decoder_layers)

    def head_config(self, target: T5Config) -> EagleConfig:
        """Returns the sizes of an EAGLE head, a draft with ``unrolled_steps``."""
        sizes = head_config(target, self.of(target), self.width, self.depths, self.reads_source)
        return dataclasses.replace(sizes, dropout_rate=self.dropout_rate)


for _settings in (DistillOptions, KeptLayers):
    gin.external_configurable(_settings, module="spec_t5x")


@gin.configurable
def distill(
    *,
    output_dir: str,
    target: str,
    data: TrainingData,
    optimizer: OptimizerOptions,
    options: TrainOptions,
    distillation: DistillOptions,
    layers: KeptLayers | None = None,
    model: NetworkConfig | None = None,
    initial_checkpoint: str | None = None,
    vocabulary: str | None = None,
    export_dtype: str = "bfloat16",
    cache_dir: str | None = None,
) -> TrainResult:
    """Samples the target's outputs, trains a draft on them, and exports the best draft.

    Args:
        output_dir: created if absent; if it has checkpoints, the run resumes from the newest.
        target: directory or name of the model that the draft is for (``loading.load``): a T5, or
            a language model, whose draft learns from the references.
        data: text pairs or lines, without a vocabulary, because the target's is used.
        options: settings of the loop; ``objective`` and ``distillation_weight`` make the loss.
        distillation: options of the texts to train and measure on.
        layers: makes the draft of the target's layers. Give either this or ``model``.
        model: configuration of a draft that starts with random parameters,
            unless ``initial_checkpoint``, a model with the sizes of ``model``, is given.
        vocabulary: for a target without one, as T5X's: a SentencePiece model, or "bytes".
        export_dtype: dtype of the exported parameters, 'bfloat16' or 'float32', or 'int8' with
            ``model``.
        cache_dir: folder of the target's outputs, which drafts for one target may share; None is
            ``cache`` in ``output_dir``.

    Raises:
        InputError: files, target or settings cannot be used.
    """
    directory = expanded(output_dir)
    draft = directory / "draft"
    check_settings(optimizer, options, export_dtype, draft)
    _check(data, layers, model, initial_checkpoint, options, distillation)
    if layers and layers.encoder == SHARED:
        check_choice("stored dtype", export_dtype, STORED_DTYPES)
    layout = Layout.create(options.data_parallel, options.model_parallel)
    dtype = resolve_dtype("auto")
    loaded = load(target, dtype=dtype, vocabulary=vocabulary, shardings=layout.shardings)
    check_kind(loaded.config, data, options)
    _check_outputs(loaded, distillation)
    student = _student(loaded, layers, model, initial_checkpoint, options)
    bound = loaded.bind()
    if layers and layers.depths:
        bound = bound.showing(layers.depths)
    cache = expanded(cache_dir) if cache_dir else directory / "cache"
    generator = Generator(
        target=bound, vocabulary=loaded.vocabulary, max_source_len=max(data.longest[0], 2)
    )
    pairs = {
        part: data.pairs(part, loaded.vocabulary, options.seed, first)
        for part, first in (("train", distillation.train_texts), ("dev", distillation.dev_texts))
    }
    shared = options.seed, data.longest
    texts = distillation.outputs, distillation.temperature, distillation.on_policy < 1
    # Refused here, before the target writes texts for hours.
    started = {
        "target": files_digest(str(target), str(directory))["content"],
        "draft": f"{network_settings(student.config)}, layers {student.shared_layers}",
        "initial checkpoint": files_digest(initial_checkpoint, str(directory))["content"],
        "training set or seed": digest(shared, texts, *_ids(pairs["train"])),
        "held-out set": digest(shared, distillation.eval_temperatures, *_ids(pairs["dev"])),
    }
    with held_run(directory, started):
        with layout.within():
            train_pairs, held_out = _texts(data, pairs, generator, cache, options, distillation)
        if number := layers and layers.draft_vocab_size:
            ids = likeliest_ids(train_pairs.target.ids, number, loaded.config.vocab_size)
            student = student.narrowed(loaded.params, ids)
        result = fit(
            DraftLearner(student=student, target=bound, distillation=distillation, options=options),
            *optimizer.build(options.steps),
            data.batches(train_pairs, options.seed),
            held_out,
            directory,
            initial_params=student.params,
            export_dtype=export_dtype,
        )
        _export(draft, result.best, student, loaded, data, export_dtype)
    log_exported(result, f"draft in {draft}")
    return result


def _export(
    directory: Path,
    best: Best,
    student: Student,
    target: LoadedModel,
    data: TrainingData,
    dtype: str,
) -> None:
    """Writes the best draft to ``directory``, in place of the export of an earlier run."""
    figures = {"step": best.step, "held_out": [each.record()["held_out"] for each in best.dev]}
    export = {"dtype": dtype, "extra": figures, "overwrite": True}
    if student.shared_layers is None:
        export["extra"] = figures | data.stored
        save_model(directory, best.params, student.config, target.vocabulary, **export)
    else:
        shared = (student.config, student.shared_layers, target)
        save_shared_draft(directory, best.params, *shared, head=student.head, **export)


def _check(
    data: TrainingData,
    layers: KeptLayers | None,
    model: NetworkConfig | None,
    initial_checkpoint: str | None,
    options: TrainOptions,
    distillation: DistillOptions,
) -> None:
    """Raises ``InputError`` for settings that exclude each other, before a target is loaded."""
    data.check_for_draft()
    if distillation.outputs == "references" and not distillation.on_policy:
        check_unused(distillation, "no text is sampled to train on", "temperature")
    kept, given = layers or KeptLayers(), "neither" if layers is None else "both"
    if kept.draft_vocab_size:
        check_unused(options, "the draft does not have all tokens", "label_smoothing")
    if options.uses_target and options.distillation_weight == 1:
        why = "distillation_weight 1, which leaves the cross-entropy out"
        check_unused(options, why, "label_smoothing", *(["z_loss"] if options.z_loss else []))
    mistakes = (
        (
            data.name("dev") is None,
            f"{type(data).__name__} has no dev file or split: give held-out data to measure alpha",
        ),
        (
            (layers is None) == (model is None),
            f"{given} of distill.layers and distill.model given: give one of them",
        ),
        (
            initial_checkpoint and model is None,
            f"initial_checkpoint is {initial_checkpoint!r} and the draft starts as layers of its "
            "target: give distill.model instead of distill.layers, or leave it out",
        ),
        (
            distillation.patience and not options.eval_period,
            f"patience is {distillation.patience} and eval_period 0: give a period of evaluations",
        ),
        (
            kept.unrolled_steps and distillation.on_policy,
            f"on_policy is {distillation.on_policy} and unrolled_steps {kept.unrolled_steps}: a "
            "draft that continues from the target's states samples no texts, set one of them to 0",
        ),
    )
    for is_made, message in mistakes:
        if is_made:
            raise InputError(message)


def _check_outputs(target: LoadedModel, distillation: DistillOptions) -> None:
    """Raises ``InputError`` if outputs of a language model are needed, which has no sources."""
    writes = distillation.outputs == "target" or distillation.on_policy
    if writes and not target.config.has_source:
        raise InputError(
            f"DistillOptions.outputs is {distillation.outputs!r} and on_policy "
            f"{distillation.on_policy}: give 'references' and 0 for a language model, which has no "
            "source to write an output for"
        )


def _student(
    target: LoadedModel,
    layers: KeptLayers | None,
    model: NetworkConfig | None,
    initial_checkpoint: str | None,
    options: TrainOptions,
) -> Student:
    """Makes the draft to train, in float32: from the target, a checkpoint, or random."""
    kind = type(target.config).__name__
    if layers is not None:
        if not target.config.has_source:
            raise InputError(
                f"{target.directory} is a language model: give distill.layers=None and "
                f"distill.model=@{kind}()"
            )
        return _of_target(target, layers, options)
    if type(model) is not type(target.config):
        raise InputError(
            f"the target is a {kind} and distill.model a {type(model).__name__}: give @{kind}()"
        )
    if model.vocab_size != target.config.vocab_size:
        raise InputError(
            f"the target's vocab_size is {target.config.vocab_size}, the draft's "
            f"{model.vocab_size}: make them equal"
        )
    if initial_checkpoint is None:
        init = jax.jit(Network(model, options).init)
        return Student(config=model, params=init(jax.random.key(options.seed)))
    # If the checkpoint has no vocabulary, it is assumed to have the target's.
    initial = load_initial(initial_checkpoint, target.vocabulary, model, options)
    check_same_vocabulary(target, initial)
    return Student(config=model, params=initial.params)


def _of_target(target: LoadedModel, layers: KeptLayers, options: TrainOptions) -> Student:
    """Makes a draft, or an EAGLE head if ``unrolled_steps``, from layers of its target."""
    config = target.config
    if layers.draft_vocab_size is not None:
        check_number(layers.draft_vocab_size, config.vocab_size)
    is_shared = layers.encoder == SHARED
    if is_shared and not isinstance(config, T5Config):
        raise InputError(
            f"{target.directory} is a {type(config).__name__}, whose encoder no draft shares: give "
            "KeptLayers.encoder='all' or another rule"
        )
    decoder = layers.of(config)
    if layers.unrolled_steps:
        config = layers.head_config(config)
        key = jax.random.key(options.seed)
        own = first_head(key, target.params, target.config, config, decoder)
    else:
        rule = "all" if is_shared else layers.encoder
        encoder = kept_layers(rule, config.num_encoder_layers)
        own, config = keep_layers(target.params, config, encoder=encoder, decoder=decoder)
        config = dataclasses.replace(config, dropout_rate=layers.dropout_rate)
        own = own_params(own) if is_shared else own
    return Student(
        config=config,
        params=jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), own),
        shared_layers=decoder if is_shared else None,
        unrolled_steps=layers.unrolled_steps,
    )


def _ids(pairs: TokenisedPairs) -> tuple:
    return tuple(array for side in (pairs.source, pairs.target) for array in (side.ids, side.ends))


def _texts(
    data: TrainingData,
    pairs: Mapping[str, TokenisedPairs],
    target: Generator,
    cache: Path,
    options: TrainOptions,
    distillation: DistillOptions,
) -> tuple[TokenisedPairs, dict[float, Batches]]:
    """Returns the training pairs, and the held-out batches by temperature of sampling.

    ``pairs`` are the data's, by part; the target's outputs replace their targets.
    """

    def sampled(part: str, temperature: float, seed: int) -> TokenisedPairs:
        settings = SampleOptions(
            temperature=temperature,
            max_length=data.longest[1],
            tokens_per_batch=data.tokens_per_batch,
            buckets=tuple(data.buckets),
            seed=seed,
        )
        return sample_targets(target, pairs[part], settings, cache, data.name(part))

    # A language model has no sources to sample outputs for: alpha is measured on the held-out
    # lines. seed + 1 gives other random numbers than the training outputs'.
    held_out = {
        temperature: pairs["dev"]
        if target.is_decoder_only
        else sampled("dev", temperature, (options.seed + 1) % 2**32)
        for temperature in distillation.eval_temperatures
    }
    # At on_policy 1 the draft samples all training texts itself, so the target samples none.
    train = pairs["train"]
    if distillation.outputs == "target" and distillation.on_policy < 1:
        train = sampled("train", distillation.temperature, options.seed)
    return train, {t: data.batches(each, options.seed) for t, each in held_out.items()}
