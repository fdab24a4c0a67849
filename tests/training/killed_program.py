"""Runs of ``test_killed_runs.py``, each in a process of its own that may be killed."""

import json
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import jax
import numpy as np
import optax

from spec_t5x.data.batching import Batches
from spec_t5x.models.kept_layers import keep_layers, own_params
from spec_t5x.testing.toy_models import tiny_t5
from spec_t5x.training.distill import DistillOptions, DraftLearner, Student
from spec_t5x.training.learners import Network
from spec_t5x.training.optimizers import OptimizerOptions
from spec_t5x.training.trainer import TrainOptions, fit
from tests.training.toys import copy_batches, toy_config

STEPS = 24
# No period divides another: checkpoints cut the windows of log lines.
PERIODS = {"log_period": 4, "eval_period": 7, "checkpoint_period": 3}
CONFIG = toy_config(30, dropout_rate=0.1)


class Signalling(Batches):
    """Batches that say which step has been begun last."""

    begun: Synchronized

    def batches(self, start_step=0):
        for step, batch in enumerate(super().batches(start_step), start=start_step):
            self.begun.value = step
            yield batch


def run(kind: str, directory: Path, cache: Path, begun: Synchronized) -> None:
    """Trains to the end, and writes there where it ended."""
    jax.config.update("jax_disable_most_optimizations", True)
    # Each process but the first reads its programs.
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    batches = copy_batches(30, kind=Signalling)
    batches.begun = begun
    schedule = OptimizerOptions(learning_rate=1e-2, warmup_steps=5).schedule(STEPS)
    run_kind = {"train": _train, "distill": _distill}[kind]
    state, more = run_kind(directory, batches, optax.adam(schedule), schedule)
    np.savez(directory / "end.npz", *map(np.asarray, jax.tree.leaves(state)))
    (directory / "end.json").write_text(json.dumps(more))


def _train(directory, batches, optimizer, schedule):
    learner = Network(CONFIG, TrainOptions(steps=STEPS, **PERIODS))
    result = fit(learner, optimizer, schedule, batches, copy_batches(30), directory)
    return result.state, result.dev[0].cross_entropy


def _distill(directory, batches, optimizer, schedule):
    target = tiny_t5(0, num_decoder_layers=2)
    params, config = keep_layers(target.params, target.config, encoder=(0,), decoder=(1,))
    student = Student(config=config, params=own_params(params), shared_layers=(1,))
    learner = DraftLearner(
        student=student,
        target=target,
        distillation=DistillOptions(on_policy=0.3),
        options=TrainOptions(steps=STEPS, **PERIODS),
    )
    held_out = {0.0: copy_batches(30)}
    start = {"initial_params": student.params}
    result = fit(learner, optimizer, schedule, batches, held_out, directory, **start)
    best = result.best
    return (result.state, best.params), [best.step, [each.to_dict() for each in best.dev]]
