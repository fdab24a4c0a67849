"""A tiny T5 and batches of copies, for runs whose text does not matter."""

import functools

import jax
import numpy as np
import optax

from spec_t5x.data.batching import Batches, TokenisedPairs
from spec_t5x.models.t5 import T5Config
from spec_t5x.training.learners import Network
from spec_t5x.training.trainer import TrainOptions, TrainResult, fit


def toy_config(vocab_size: int = 16, emb_dim: int = 8, **changes) -> T5Config:
    """One layer on each side."""
    return T5Config(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=2,
        head_dim=emb_dim // 2,
        mlp_dim=2 * emb_dim,
        num_encoder_layers=1,
        num_decoder_layers=1,
        **changes,
    )


def copy_pairs(vocab_size: int = 16) -> TokenisedPairs:
    """40 sources of 3 to 8 tokens, each its own target."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 9, 40)
    ids = np.concatenate([[*rng.integers(2, vocab_size, n - 1), 1] for n in lengths])
    ids, ends = ids.astype(np.int32), np.cumsum(lengths)
    return TokenisedPairs(
        source_ids=ids, source_ends=ends, target_ids=ids, target_ends=ends, num_dropped=0
    )


def copy_batches(
    vocab_size: int = 16, *, rows: int = 4, seed: int = 0, kind: type[Batches] = Batches
) -> Batches:
    """Batches of ``copy_pairs``."""
    return kind(copy_pairs(vocab_size), tokens_per_batch=8 * rows, seed=seed, buckets=(8,))


@functools.cache
def _optimizer(make, schedule):
    return make(schedule)


@functools.cache
def _start(config: T5Config):
    learner = Network(config, TrainOptions(steps=1))
    return jax.jit(learner.init)(jax.random.key(0))


def train_toy(
    directory,
    steps: int,
    *,
    config: T5Config | None = None,
    batches=None,
    dev: Batches | None = None,
    optimizer=optax.adam,
    schedule=lambda step: 1e-2,
    learner: type[Network] = Network,
    **options,
) -> TrainResult:
    """A run of a toy; nothing is logged, evaluated or kept but what ``options`` ask for."""
    periods = {"log_period": 0, "eval_period": 0, "checkpoint_period": 0}
    config = config or toy_config()
    return fit(
        learner(config, TrainOptions(steps=steps, **periods | options)),
        _optimizer(optimizer, schedule),
        schedule,
        batches or copy_batches(),
        dev,
        directory,
        initial_params=_start(config),
    )


def assert_identical(left, right) -> None:
    """The same arrays in the same tree."""
    jax.tree.map(np.testing.assert_array_equal, left, right)
