"""The training loop: one jitted step, checkpoints, exact resumption.

A run is a function of its options, data and seed alone: batch and dropout key follow from the step,
so that a run that was killed and restarted ends with the same parameters as an undisturbed one.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from spec_t5x.errors import InputError
from spec_t5x.labs.training.accumulation import mean_gradient
from spec_t5x.labs.training.batching import PairBatch
from spec_t5x.labs.training.finite import DivergedError, check_params, describe
from spec_t5x.labs.training.interfaces import Inputs, Learner, Measurement, Positioned
from spec_t5x.labs.training.layout import Layout
from spec_t5x.labs.training.losses import LossSums
from spec_t5x.labs.training.optimizers import Schedule
from spec_t5x.labs.training.run_checkpoints import FOLDER, RunCheckpoints
from spec_t5x.labs.training.text_metrics import TextMetrics, rounded_params
from spec_t5x.labs.training.training_log import TrainingProgress
from spec_t5x.types import Array, Key, PyTree

_NO_SUMS = {"loss": 0.0, "num_correct": 0.0, "num_tokens": 0.0}


@flax.struct.dataclass
class TrainState:
    """The arrays that a training step changes."""

    step: Any  # number of steps taken, int32 scalar
    params: PyTree  # float32
    opt_state: PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """The parameters with the best measurement on held-out data, and all their measurements."""

    step: int
    params: PyTree
    dev: Sequence[Measurement]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The final state of a run and its results."""

    state: TrainState
    # Measurements of the last step, rounded as in an export; empty if it was not evaluated.
    dev: Sequence[Measurement]
    finished: bool  # False if ``max_minutes`` ran out
    # Scores of generated texts by task and metric; None if the last step was not scored.
    metrics: dict[str, dict[str, float]] | None = None
    best: Best | None = None  # None unless the learner ``keeps_best``


def init_state(
    learner: Learner,
    optimizer: optax.GradientTransformation,
    layout: Layout | None = None,
    params: PyTree | None = None,
) -> TrainState:
    """Returns the state at step 0, with a copy of ``params``, or ``learner.init``'s if None."""

    def make(params):
        if params is None:
            params = learner.init(jax.random.key(learner.options.seed))
        return TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))

    layout = layout or Layout()
    if params is not None:
        # Copied, because the first step donates the state's buffers.
        params = jax.tree.map(jnp.array, jax.device_put(params, layout.params))
    return layout.initial(make, params)


def make_train_step(
    learner: Learner, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Inputs, Key[Array, ""], PyTree | None], tuple[TrainState, LossSums]]:
    """Returns the jitted function of one optimizer step on a batch's mean loss.

    The function takes the state (donated), a batch's arrays, the run's key (to be folded with the
    step) and the target's parameters or None, and returns the new state and the sums.
    """
    gradient_fn = mean_gradient(learner.loss, learner.options.accumulation_steps)

    def train_step(state, inputs, run_key, target_params):
        key = jax.random.fold_in(run_key, state.step)
        gradients, sums = gradient_fn(state.params, inputs, key, target_params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # Clipping needs the same norm, and XLA computes it once.
        sums = sums.replace(gradient_norm=optax.global_norm(gradients))
        return TrainState(state.step + 1, params, opt_state), sums

    return jax.jit(train_step, donate_argnums=0)


def fit(
    learner: Learner,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    stream: Positioned,
    dev: Any,
    directory: str | Path,
    *,
    initial_params: PyTree | None = None,
    scorer: TextMetrics | None = None,
    export_dtype: str = "float32",
) -> TrainResult:
    """Trains to step ``learner.options.steps``, from the newest checkpoint if there is one.

    Writes ``checkpoints/`` and ``metrics.jsonl`` to ``directory``. Logs the ``schedule``, evaluates
    on ``dev`` and with ``scorer``, if given; ``initial_params`` replace the learner's. The result's
    measurements are of parameters rounded to ``export_dtype``.

    Raises:
        InputError: the checkpoint is of another model or data, or cannot be written, or the run
            diverges; the newest checkpoint is kept.
    """
    options = learner.options
    deadline = time.monotonic() + 60.0 * (options.max_minutes or float("inf"))
    directory = Path(directory).absolute()
    layout = Layout.create(options.data_parallel, options.model_parallel, learner.shardings)
    with (
        layout.within(),
        RunCheckpoints(directory / FOLDER, options.keep_checkpoints) as checkpoints,
    ):
        state = init_state(learner, optimizer, layout, initial_params)
        window, position = _NO_SUMS, None
        if checkpoints.latest_step is not None:
            state, window, position = checkpoints.restore(state)
        start = int(state.step)
        with TrainingProgress(
            directory, start_step=start, steps=options.steps, tensorboard=options.tensorboard
        ) as progress:
            if start:
                progress.say(f"resumed at step {start}")
            progress.update(start, options.steps, "compiling")
            loop = _Loop(
                learner=learner,
                train_step=layout.step(make_train_step(learner, optimizer), state),
                dev=dev,
                schedule=schedule,
                checkpoints=checkpoints,
                stream=stream,
                progress=progress,
                target_params=learner.target and layout.frozen(learner.target),
                layout=layout,
                scorer=scorer,
                export_dtype=export_dtype,
                state=state,
                window=window,
            )
            try:
                return loop.run(stream.batches(start, position), deadline)
            except DivergedError as error:
                raise InputError(
                    f"{error}; {checkpoints.describe_latest()}: lower "
                    "OptimizerOptions.learning_rate, or check that batch, and run the same "
                    "command again"
                ) from error


@dataclasses.dataclass(kw_only=True)
class _Loop:
    """The loop of ``fit``, from the start or from a checkpoint to the end."""

    learner: Learner
    train_step: Callable
    dev: Any
    schedule: Schedule
    checkpoints: RunCheckpoints
    stream: Positioned
    progress: TrainingProgress
    target_params: PyTree | None
    layout: Layout
    scorer: TextMetrics | None
    export_dtype: str
    state: TrainState
    # Sums over the steps since the last log line. Every checkpoint holds them, so that a run that
    # was killed between two log lines logs the same figures.
    window: dict[str, float]
    # Sums of the newest step, which the device may still be computing, the step and its inputs.
    pending: tuple[LossSums, int, Inputs] | None = None

    def run(self, batches: Iterator[PairBatch], deadline: float) -> TrainResult:
        options, step = self.learner.options, self.step
        # seed + 1, because the initialization uses seed. On CPUs "rbg" makes dropout masks several
        # times faster than JAX's default.
        run_key = jax.random.key(options.seed + 1, impl="rbg")
        # Results by step.
        dev, metrics = {}, {}
        if step == 0 and self.learner.keeps_best:
            dev[step] = self._evaluate()
        while not self._is_over(step) and time.monotonic() < deadline:
            self._step(step, next(batches), run_key)
            step += 1
            if _is_due(step, options.log_period):
                self._log()
            # Before the checkpoint, so that parameters that cannot be evaluated are not saved.
            if _is_due(step, options.eval_period) or self._is_over(step):
                dev[step] = self._evaluate()
            if self.scorer and _is_due(step, self.scorer.options.period):
                metrics[step] = self._score()
            if _is_due(step, options.checkpoint_period):
                self._save()
        finished = self._is_over(step)
        # A run that resumed at its end has no result yet. (A run out of time is not evaluated: the
        # command that resumes it continues as if it had not stopped.)
        if finished and step not in dev:
            dev[step] = self._evaluate()
        self._save()
        # After the checkpoint, because scoring may take long and training does not depend on it.
        if finished and self.scorer and step not in metrics:
            metrics[step] = self._score()
        # Raises here, before anything is exported, if the checkpoint cannot be written.
        self.checkpoints.finish()
        found = dev.get(step, [])
        if found and self.export_dtype != "float32":
            found = self._measure_export(self.state.params)
        return TrainResult(
            state=self.state,
            dev=found,
            finished=finished,
            metrics=metrics.get(step),
            best=self._best() if self.learner.keeps_best else None,
        )

    @property
    def step(self) -> int:
        """Number of steps taken; waits for the device."""
        return int(self.state.step)

    def _is_over(self, step: int) -> bool:
        best, patience = self.checkpoints.best_step, self.learner.patience
        is_stale = patience > 0 and best is not None and step - best >= patience
        return step >= self.learner.options.steps or is_stale

    def _step(self, step: int, batch: PairBatch, run_key: Key[Array, ""]) -> None:
        inputs = self.learner.inputs(self.state.params, self.target_params, step, batch)
        placed = self.layout.rows(inputs, self.learner.options.accumulation_steps)
        self.state, sums = self.train_step(self.state, placed, run_key, self.target_params)
        # Waits for the previous step, so that the host is at most one step ahead of the device.
        self._wait()
        self.pending = sums, step + 1, inputs
        self.progress.count(step + 1, batch.num_tokens, batch.num_pairs)

    def _wait(self) -> None:
        """Waits for the pending step; adds its sums to the window, or raises ``DivergedError``."""
        if self.pending is None:
            return
        (sums, step, (source, _, target, *_)), self.pending = self.pending, None
        sums = jax.device_get(sums)
        if not (math.isfinite(sums.loss) and math.isfinite(sums.gradient_norm)):
            raise DivergedError(
                f"step {step} has a loss of {sums.loss / max(sums.num_tokens, 1.0):.3g} and a "
                f"gradient of norm {sums.gradient_norm:.3g} (learning rate "
                f"{float(self.schedule(step - 1)):.3g}, batch {step - 1} of {len(source)} rows of "
                f"{source.shape[1]} source and {target.shape[1]} target tokens; "
                f"{describe(self.state.params)})"
            )
        self.window = {
            name: total + float(getattr(sums, name)) for name, total in self.window.items()
        }

    def _log(self) -> None:
        self._wait()
        window, tokens = self.window, max(self.window["num_tokens"], 1.0)
        means = {"loss": window["loss"] / tokens, "accuracy": window["num_correct"] / tokens}
        self.progress.report(self.step, **means, rate=float(self.schedule(self.step - 1)))
        self.window = _NO_SUMS

    def _score(self) -> dict[str, dict[str, float]]:
        self._wait()
        with self.progress.pause():
            return self.scorer.score(self.step, self.state.params, self.progress)

    def _evaluate(self) -> Sequence[Measurement]:
        self._wait()
        check_params(self.state.params, self.step)
        if self.dev is None:
            return []
        with self.progress.pause():
            found = self._measure(self.state.params)
        for each in found:
            if not math.isfinite(each.value):
                raise DivergedError(f"the {each.name} after step {self.step} is {each.value:.3g}")
        best = self.checkpoints.best_score
        is_best = self.learner.keeps_best and (best is None or found[0].value > best)
        for each in found:
            mark = "  best" if is_best and each is found[0] else ""
            self.progress.note(self.step, f"{each}{mark}", each.curves(), **each.record())
        if is_best:
            self._save(score=found[0].value)
        return found

    def _measure(self, params: PyTree) -> Sequence[Measurement]:
        return self.learner.evaluate(params, self.target_params, self.dev, self.layout.rows)

    def _measure_export(self, params: PyTree) -> Sequence[Measurement]:
        return self._measure(rounded_params(params, stored=self.export_dtype, computed="float32"))

    def _save(self, score: float | None = None) -> None:
        self._wait()
        if self.checkpoints.latest_step == self.step and score is None:
            return
        check_params(self.state.params, self.step)
        given = self.step, self.state, self.window, self.stream.save_position
        with self.progress.pause():
            self.checkpoints.save(*given, score)

    def _best(self) -> Best:
        step = self.checkpoints.best_step
        params = self.checkpoints.restore(self.state, step)[0].params
        return Best(step=step, params=params, dev=self._measure_export(params))


def _is_due(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
