"""Runs of ``test_killed_runs.py``, each in a process of its own that may be killed."""

import json
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import jax
import numpy as np
import optax

from spec_t5x.data.batching import Batches, TokenisedPairs
from spec_t5x.models.kept_layers import keep_layers, own_params
from spec_t5x.models.t5 import T5Config
from spec_t5x.testing.toy_models import tiny_t5
from spec_t5x.training.distill import DistillOptions, Student, distill
from spec_t5x.training.schedules import make_schedule
from spec_t5x.training.trainer import TrainOptions, fit

STEPS = 24
# No period divides another: checkpoints cut the windows of log lines.
PERIODS = {"log_period": 4, "eval_period": 7, "checkpoint_period": 3}
CONFIG = T5Config(
    vocab_size=30,
    emb_dim=8,
    num_heads=2,
    head_dim=4,
    mlp_dim=16,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout_rate=0.1,
)


class Signalling(Batches):
    """Batches that say which step has been begun last."""

    begun: Synchronized

    def batches(self, start_step=0):
        for step, batch in enumerate(super().batches(start_step), start=start_step):
            self.begun.value = step
            yield batch


def make_batches(kind=Batches) -> Batches:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 9, 40)
    ids = np.concatenate([[*rng.integers(2, 30, n - 1), 1] for n in lengths]).astype(np.int32)
    ends = np.cumsum(lengths)
    pairs = TokenisedPairs(
        source_ids=ids, source_ends=ends, target_ids=ids, target_ends=ends, num_dropped=0
    )
    return kind(pairs, tokens_per_batch=32, seed=0, buckets=(8,))


def run(kind: str, directory: Path, cache: Path, begun: Synchronized) -> None:
    """Trains to the end, and writes there where it ended."""
    jax.config.update("jax_disable_most_optimizations", True)
    # Each process but the first reads its programs.
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    batches = make_batches(Signalling)
    batches.begun = begun
    schedule = make_schedule(peak=1e-2, steps=STEPS, warmup_steps=5)
    run_kind = {"train": _train, "distill": _distill}[kind]
    state, more = run_kind(directory, batches, optax.adam(schedule), schedule)
    np.savez(directory / "end.npz", *map(np.asarray, jax.tree.leaves(state)))
    (directory / "end.json").write_text(json.dumps(more))


def _train(directory, batches, optimizer, schedule):
    result = fit(
        CONFIG,
        optimizer,
        schedule,
        batches,
        make_batches(),
        TrainOptions(steps=STEPS, **PERIODS),
        directory,
    )
    return result.state, result.dev.cross_entropy


def _distill(directory, batches, optimizer, schedule):
    target = tiny_t5(0, num_decoder_layers=2)
    params, config = keep_layers(target.params, target.config, encoder=(0,), decoder=(1,))
    student = Student(config=config, params=own_params(params), shared_layers=(1,))
    result = distill(
        student,
        target,
        optimizer,
        schedule,
        batches,
        {0.0: make_batches()},
        TrainOptions(steps=STEPS, **PERIODS),
        DistillOptions(on_policy=0.3),
        directory,
    )
    held_out = [each.to_dict() for each in result.held_out]
    return (result.training.state, result.params), [result.step, held_out]
