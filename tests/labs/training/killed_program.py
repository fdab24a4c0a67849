"""Training run of ``test_killed_runs.py``, in a separate process that may be killed."""

import dataclasses
import json
import threading
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import jax
import numpy as np
import optax

from spec_t5x.labs.training.batching import Batches
from spec_t5x.labs.training.interfaces import TrainOptions
from spec_t5x.labs.training.losses import DevMetrics
from spec_t5x.labs.training.optimizers import OptimizerOptions
from spec_t5x.labs.training.trainer import fit
from tests.labs.training.toys import Copier, copy_batches

STEPS = 24
# No period divides another, so that checkpoints fall between lines of the log.
PERIODS = {"log_period": 4, "eval_period": 7, "checkpoint_period": 3}


class Signalling(Batches):
    """Batches that store in ``begun`` the number of the last step that took its batch.

    Step ``last`` never gets its batch.
    """

    begun: Synchronized
    last: int | None

    def _from(self, start_step):
        for step, batch in enumerate(super()._from(start_step), start=start_step):
            self.begun.value = step
            if step == self.last:
                threading.Event().wait()
            yield batch


class Accuracy(DevMetrics):
    """Metric whose value is the accuracy; higher is better."""

    @property
    def value(self):
        return self.accuracy


class Keeper(Copier):
    """Learner that keeps its best parameters, as a draft's learner does."""

    keeps_best = True

    def evaluate(self, *args):
        (found,) = super().evaluate(*args)
        return [Accuracy(**dataclasses.asdict(found))]


def run(directory: Path, cache: Path, begun: Synchronized, last: int | None) -> None:
    """Trains ``STEPS`` steps in ``directory``; writes end.npz (state) and end.json (results).

    With a step ``last``, the process waits there to be killed.
    """
    # Later processes read the first one's compiled programs.
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    batches = copy_batches(kind=Signalling)
    batches.begun, batches.last = begun, last
    schedule = OptimizerOptions(learning_rate=1e-2, warmup_steps=5).schedule(STEPS)
    learner, dev = Keeper(TrainOptions(steps=STEPS, **PERIODS)), copy_batches()
    result = fit(learner, optax.adam(schedule), schedule, batches, dev, directory)
    end = (result.state, result.best.params)
    np.savez(directory / "end.npz", *map(np.asarray, jax.tree.leaves(end)))
    found = {"best": result.best.step, "dev": [each.curves() for each in result.dev]}
    (directory / "end.json").write_text(json.dumps(found))
