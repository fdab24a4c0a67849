"""Trains a draft for a target on a file of text pairs or a seqio task, as a gin file says.

    spec-t5x distill --gin_file=FILE.gin --gin.NAME=VALUE ...

The output directory gets ``cache/`` (the tokenised pairs, and the texts that the target
wrote), ``checkpoints/``, ``best/``, ``metrics.jsonl`` and, at the end, ``draft/``: the
draft of the highest alpha on held-out text, for ``--draft``. Run the same command again to
go on after an interruption.
"""

import dataclasses
from pathlib import Path

import gin
import jax
import jax.numpy as jnp

from spec_t5x.checkpoints.loading import check_same_vocabulary, load
from spec_t5x.checkpoints.own.native import save_model
from spec_t5x.checkpoints.own.shared_drafts import save_shared_draft
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.data.batching import Batches, TokenisedPairs
from spec_t5x.errors import InputError
from spec_t5x.machine.dtypes import resolve_dtype
from spec_t5x.models.kept_layers import keep_layers, kept_layers, own_params
from spec_t5x.models.narrow_head import check_number, likeliest_ids
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config
from spec_t5x.training import distill as distill_lib
from spec_t5x.training.distill import DistillOptions, DistillResult, Student
from spec_t5x.training.progress import say
from spec_t5x.training.run import (
    OptimizerOptions,
    check_settings,
    encoder_decoder,
    load_initial,
)
from spec_t5x.training.run_data import (
    TaskDataOptions,
    TrainingData,
    check_inherits_vocabulary,
    make_batches,
)
from spec_t5x.training.target_texts import WritingOptions, write_texts
from spec_t5x.training.trainer import TrainOptions, init_params

# Of the target's encoder: the draft reads the source with it, and has none of its own.
SHARED = "shared"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptLayers:
    """A draft that starts as layers of its target: "all", "first:K" or "every:K"."""

    decoder: str = "every:2"
    # Or "shared": encoder, embedding and the maps to keys and values of the source are the
    # target's and stay as they are.
    encoder: str = SHARED
    # With a shared encoder: so many tokens, the most frequent of the texts that are trained
    # on, are all that the draft's output layer knows. None is all tokens.
    tokens_known: int | None = None
    dropout_rate: float = 0.0

    def __post_init__(self):
        if self.tokens_known is not None and self.encoder != SHARED:
            raise InputError(
                f"tokens_known is {self.tokens_known} and encoder {self.encoder!r}: a narrow "
                f"output layer goes with a {SHARED!r} encoder, leave one of them out"
            )


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
    model: T5Config | None = None,
    initial_checkpoint: str | None = None,
    vocabulary: str | None = None,
    export_dtype: str = "bfloat16",
    cache_dir: str | None = None,
) -> DistillResult:
    """Writes the target's texts, trains, and exports the best draft.

    Args:
        output_dir: made if absent; what it holds is gone on with.
        target: directory or packaged name of the model that the draft is for.
        data: its vocabulary must be left out: the target's is taken.
        optimizer, options: see the classes; ``options.objective`` is what is minimised.
        distillation: on which texts.
        layers: the draft is made of the target's layers, or
        model: it is of these sizes, and starts with random parameters, or with those of
        initial_checkpoint: a model of these very sizes, of any format.
        vocabulary: of a target that holds none, as T5X's checkpoints: a SentencePiece
            model, or "bytes".
        export_dtype: of the exported parameters, 'bfloat16' or 'float32'.
        cache_dir: where tokenised pairs and the target's texts are kept, which drafts for
            one target may share; None is ``cache`` in ``output_dir``.

    Raises:
        InputError: files, target or settings that cannot be used.
    """
    directory = Path(output_dir)
    check_settings(optimizer, options, export_dtype, directory / "draft")
    _check(data, layers, model, initial_checkpoint)
    distill_lib.check_options(
        distillation, options, is_narrow=layers is not None and layers.tokens_known is not None
    )
    loaded = encoder_decoder(load(target, vocabulary=vocabulary, dtype=resolve_dtype("auto")))
    student = _student(loaded, layers, model, initial_checkpoint, options.seed)
    writer = T5Model.create(loaded.params, loaded.config)
    directory.mkdir(parents=True, exist_ok=True)
    transformation, schedule = optimizer.build(options.steps)
    cache = Path(cache_dir) if cache_dir else directory / "cache"
    train_pairs, held_out = _texts(data, loaded, writer, cache, options, distillation)
    if layers is not None and layers.tokens_known is not None:
        ids = likeliest_ids(train_pairs.target_ids, layers.tokens_known, loaded.config.vocab_size)
        student = student.narrowed(loaded.params, ids)
    result = distill_lib.distill(
        student,
        writer,
        transformation,
        schedule,
        make_batches(data, train_pairs, options.seed),
        held_out,
        options,
        distillation,
        directory,
    )
    _export(result, student, loaded, directory / "draft", export_dtype)
    return result


def _check(
    data: TrainingData,
    layers: KeptLayers | None,
    model: T5Config | None,
    initial_checkpoint: str | None,
) -> None:
    check_inherits_vocabulary(data)
    if data.dev_name is None:
        field = "dev_split" if isinstance(data, TaskDataOptions) else "dev_file"
        raise InputError(
            f"{type(data).__name__}.{field} is None: give held-out pairs to measure alpha on"
        )
    if data.longest[1] > max(data.buckets):
        raise InputError(
            f"the target writes up to {data.longest[1]} tokens and the largest of "
            f"{type(data).__name__}.buckets is {max(data.buckets)}: add a bucket, or lower the "
            "targets' length"
        )
    if (layers is None) == (model is None):
        given = "neither was" if layers is None else "both were"
        raise InputError(
            f"a draft has distill.layers of its target or a distill.model of its own, and {given} "
            "given: give one of them"
        )
    if initial_checkpoint and model is None:
        raise InputError(
            f"initial_checkpoint is {initial_checkpoint!r} and the draft starts as layers of its "
            "target: give distill.model instead of distill.layers, or leave it out"
        )


def _student(
    target: LoadedModel,
    layers: KeptLayers | None,
    model: T5Config | None,
    initial_checkpoint: str | None,
    seed: int,
) -> Student:
    """The draft at its start, in float32."""
    if layers is not None:
        return _of_target(target, layers)
    if model.vocab_size != target.config.vocab_size:
        raise InputError(
            f"the target's vocab_size is {target.config.vocab_size}, the draft's "
            f"{model.vocab_size}: make them equal"
        )
    if initial_checkpoint is None:
        return Student(config=model, params=init_params(model, seed))
    # A checkpoint without a vocabulary can only mean the target's.
    initial = load_initial(initial_checkpoint, target.vocabulary, model)
    check_same_vocabulary(target, initial)
    return Student(config=model, params=initial.params)


def _of_target(target: LoadedModel, layers: KeptLayers) -> Student:
    config = dataclasses.replace(target.config, dropout_rate=layers.dropout_rate)
    if layers.tokens_known is not None:
        check_number(layers.tokens_known, config.vocab_size)
    is_shared = layers.encoder == SHARED
    encoder_rule = "all" if is_shared else layers.encoder
    decoder = kept_layers(layers.decoder, config.num_decoder_layers)
    params, config = keep_layers(
        target.params,
        config,
        encoder=kept_layers(encoder_rule, config.num_encoder_layers),
        decoder=decoder,
    )
    own = own_params(params) if is_shared else params
    return Student(
        config=config,
        params=jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), own),
        shared_layers=decoder if is_shared else None,
    )


def _texts(
    data: TrainingData,
    target: LoadedModel,
    writer: T5Model,
    cache: Path,
    options: TrainOptions,
    distillation: DistillOptions,
) -> tuple[TokenisedPairs, dict[float, Batches]]:
    """What is trained on, and by temperature what alpha is measured on."""

    def written(pairs: TokenisedPairs, temperature: float, seed: int, what: str) -> TokenisedPairs:
        writing = WritingOptions(
            temperature=temperature,
            max_length=data.longest[1],
            tokens_per_batch=data.tokens_per_batch,
            buckets=tuple(data.buckets),
            seed=seed,
        )

        def report(done: int, total: int) -> None:
            say(f"{what}: the target has written {done:,} of {total:,} texts (T={temperature:g})")

        return write_texts(writer, pairs, writing, cache, report)

    train_pairs = data.train_pairs(target.vocabulary, cache, options.seed, distillation.train_texts)
    dev_pairs = data.dev_pairs(target.vocabulary, cache, distillation.dev_texts)
    # Other random numbers than those of the texts that are trained on.
    held_out = {
        temperature: make_batches(
            data, written(dev_pairs, temperature, options.seed + 1, data.dev_name), options.seed
        )
        for temperature in distillation.eval_temperatures
    }
    # Where the draft writes all texts itself, the target's would not be looked at.
    if distillation.outputs == "target" and distillation.on_policy < 1:
        train_pairs = written(train_pairs, distillation.temperature, options.seed, data.train_name)
    return train_pairs, held_out


def _export(
    result: DistillResult, student: Student, target: LoadedModel, directory: Path, dtype: str
) -> None:
    figures = {
        "step": result.step,
        "held_out": [each.to_dict() for each in result.held_out],
    }
    # An earlier, shorter run's is replaced.
    options = {"dtype": dtype, "extra": figures, "overwrite": True}
    if student.shared_layers is None:
        save_model(directory, result.params, student.config, target.vocabulary, **options)
    else:
        save_shared_draft(
            directory,
            result.params,
            student.config,
            student.shared_layers,
            target,
            head=student.head,
            **options,
        )
    ending = "finished" if result.finished else "out of time"
    say(f"{ending} at step {int(result.training.state.step)}; the best was step {result.step}:")
    for each in result.held_out:
        say(f"  {each}")
    say(f"draft in {directory}")
