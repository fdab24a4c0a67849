"""Trains draft heads for a target on a file of text pairs or a seqio task, as a gin file says.

    spec-t5x train-heads --gin_file=FILE.gin --gin.NAME=VALUE ...

The output directory gets ``cache/`` (the tokenised pairs), ``checkpoints/``,
``metrics.jsonl`` and, at the end, ``heads/``, which
``spec_t5x.checkpoints.own.draft_heads.load_heads`` reads. Run the same command again to go on
after an interruption.
"""

import dataclasses
from pathlib import Path

import gin

from spec_t5x.checkpoints.loading import load
from spec_t5x.checkpoints.own.draft_heads import save_heads
from spec_t5x.models.heads import HeadsConfig
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.training.heads import fit_heads
from spec_t5x.training.progress import say
from spec_t5x.training.run import OptimizerOptions, check_settings, encoder_decoder
from spec_t5x.training.run_data import TrainingData, check_inherits_vocabulary, load_batches
from spec_t5x.training.trainer import TrainOptions, TrainResult


@gin.configurable
def train_heads(
    *,
    output_dir: str,
    target: str,
    data: TrainingData,
    optimizer: OptimizerOptions,
    options: TrainOptions,
    num_heads: int = 5,
    hidden_dim: int = 256,
    export_dtype: str = "bfloat16",
    vocabulary: str | None = None,
) -> TrainResult:
    """Trains and exports.

    Args:
        output_dir: made if absent; training goes on from what it holds.
        target: directory or packaged name of the model that the heads are for.
        data: its vocabulary must be left out: the target's is taken.
        optimizer, options: see the classes.
        num_heads: tokens to look ahead.
        hidden_dim: width of each head's hidden layer.
        export_dtype: of the exported parameters, 'bfloat16' or 'float32'.
        vocabulary: of a target that holds none, as T5X's checkpoints: a SentencePiece
            model, or "bytes".

    Raises:
        InputError: files, target or settings that cannot be used.
    """
    check_inherits_vocabulary(data)
    directory = Path(output_dir)
    check_settings(optimizer, options, export_dtype, directory / "heads")
    loaded = encoder_decoder(load(target, vocabulary=vocabulary))
    config = HeadsConfig(loaded.config.emb_dim, loaded.config.vocab_size, num_heads, hidden_dim)
    directory.mkdir(parents=True, exist_ok=True)
    train_batches, dev_batches = load_batches(data, loaded.vocabulary, directory, options.seed)
    transformation, schedule = optimizer.build(options.steps)
    result = fit_heads(
        T5Model.create(loaded.params, loaded.config),
        config,
        transformation,
        schedule,
        train_batches,
        dev_batches,
        options,
        directory,
    )
    extra = {"step": int(result.state.step)}
    if result.dev is not None:
        extra |= dataclasses.asdict(result.dev)
    save_heads(
        directory / "heads",
        result.state.params,
        loaded,
        dtype=export_dtype,
        extra=extra,
        overwrite=True,  # an earlier, shorter run's
    )
    ending = "finished" if result.finished else "out of time"
    say(f"{ending} at step {extra['step']}; heads in {directory / 'heads'}")
    return result
