"""The training loop: one jitted step, checkpoints, exact resumption.

A run is a function of its options and seed alone. Batch and dropout key follow
from the step, so that a run that was killed and started again ends with the very
parameters of an undisturbed one.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from spec_t5x.data.batching import Batch, Batches
from spec_t5x.errors import InputError
from spec_t5x.models.partitioning import param_shardings
from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.training.accumulation import LossFn, mean_gradient
from spec_t5x.training.distillation_losses import CROSS_ENTROPY, OBJECTIVES
from spec_t5x.training.evaluate import DevMetrics, dev_metrics
from spec_t5x.training.finite import StepTaken, check_measured, check_params, check_sums
from spec_t5x.training.layout import Layout
from spec_t5x.training.loss_window import LossWindow
from spec_t5x.training.losses import LossSums, token_losses
from spec_t5x.training.progress import ProgressReporter
from spec_t5x.training.run_checkpoints import Restored, RunCheckpoints
from spec_t5x.training.schedules import Schedule
from spec_t5x.types import Array, Int, Key, PyTree

# JAX's generators of random numbers.
PRNG_IMPLS = ("rbg", "threefry2x32", "unsafe_rbg")
# In the position of a checkpoint: of batches that follow from the step, what they are made of.
_FINGERPRINT_NAME = "batches.sha256"


@flax.struct.dataclass
class TrainState:
    """All that changes from step to step, and all that a checkpoint holds."""

    step: Any  # steps taken, int32 scalar
    params: PyTree  # float32
    opt_state: PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Settings of the loop; periods are in steps, 0 switches one off."""

    steps: int
    seed: int = 0
    label_smoothing: float = 0.0
    z_loss: float = 1e-4
    # Used with a teacher only: what is minimised (``distillation_losses.OBJECTIVES``), and
    # its share of the loss; the rest is the text's own cross-entropy.
    objective: str = "forward_kl"
    distillation_weight: float = 0.5
    log_period: int = 50
    eval_period: int = 1000
    checkpoint_period: int = 1000
    keep_checkpoints: int = 2
    # A batch's rows are read in so many turns, each with its share of the memory; the step
    # is that of the whole batch.
    accumulation_steps: int = 1
    # Devices that share one copy of the parameters, and copies, each with its share of a
    # batch's rows. None is as many as there are devices for.
    model_parallel: int = 1
    data_parallel: int | None = None
    # Curves for TensorBoard, too, in OUTPUT_DIR/tensorboard. Needs TensorFlow.
    tensorboard: bool = False
    # Of this process's steps; then it stops, and exports what there is.
    max_minutes: float | None = None
    # 'rbg' makes dropout masks several times faster than 'threefry2x32' on CPUs.
    prng_impl: str = "rbg"

    def __post_init__(self):
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}: give 1 or more")
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}: give 0 or more")
        if self.prng_impl not in PRNG_IMPLS:
            raise InputError(
                f"prng_impl is {self.prng_impl!r}: choose one of {', '.join(PRNG_IMPLS)}"
            )
        for name in ("accumulation_steps", "model_parallel", "data_parallel", "keep_checkpoints"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}: give 1 or more")
        if not 0.0 <= self.distillation_weight <= 1.0:
            raise InputError(f"distillation_weight is {self.distillation_weight}: give 0..1")
        if self.objective not in OBJECTIVES:
            raise InputError(
                f"objective is {self.objective!r}: choose one of {', '.join(OBJECTIVES)}"
            )

    @property
    def learns_from_teacher(self) -> bool:
        """Whether a teacher's distributions enter the loss."""
        return self.objective != CROSS_ENTROPY and self.distillation_weight > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """A trained model whose distributions the student imitates."""

    config: T5Config
    params: PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Where a run ended."""

    state: TrainState
    dev: DevMetrics | None  # None without a dev set
    finished: bool  # all steps taken, or ended by a watch; False if the time ran out first
    # By task; None without a scorer, or where the time ran out before its turn.
    metrics: dict[str, dict[str, float]] | None = None


# The source, the target text shifted right, the target text.
Inputs = tuple[Int[Array, "batch source"], Int[Array, "batch length"], Int[Array, "batch length"]]
TrainStep = Callable[
    [TrainState, Inputs, Key[Array, ""], PyTree | None],
    tuple[TrainState, LossSums],
]
# Of the state, the number of steps taken, and the batch that comes next.
MakeInputs = Callable[[TrainState, int, Batch], Inputs]


@runtime_checkable
class Watch(Protocol):
    """Looks at a run at its beginning and in every evaluation, and may end it early."""

    def see(self, step: int, params: PyTree, reporter: ProgressReporter) -> None:
        """Told the parameters after ``step`` steps; again, after a resumption."""

    def is_over(self, step: int) -> bool:
        """Whether no step shall follow the first ``step``."""


@runtime_checkable
class Scorer(Protocol):
    """Scores what a model writes, every so often and at the end."""

    period: int  # in steps; 0 only at the end

    def score(
        self, step: int, params: PyTree, reporter: ProgressReporter
    ) -> dict[str, dict[str, float]]:
        """Figures by task and name, after ``step`` steps; told to ``reporter``."""


@runtime_checkable
class Positioned(Protocol):
    """Batches whose order does not follow from the step alone, as those of a stream.

    ``run_steps`` takes these as it takes ``Batches``. Every checkpoint then holds the
    position too: the two appear together, and go together.
    """

    def save_position(self, directory: Path) -> None:
        """Writes into an empty directory what comes after the batches that were drawn.

        Of the iterator that ``batches`` gave last; also before its first batch, and in
        another thread than the one that draws them, which waits meanwhile.
        """

    def batches(self, start_step: int = 0, position: Path | None = None) -> Iterator[Batch]:
        """Yields batch ``start_step``, ``start_step + 1``, ... without end.

        ``position`` is a directory that ``save_position`` wrote into after so many batches;
        None without a checkpoint, at step 0. It stays as long as the iterator is not asked
        for a second batch.
        """


def init_state(
    config: T5Config,
    optimizer: optax.GradientTransformation,
    seed: int,
    layout: Layout | None = None,
) -> TrainState:
    """Fresh parameters and optimizer state at step 0."""
    return fresh_state(lambda key: _fresh_params(config, key), optimizer, seed, layout)


def fresh_state(
    init: Callable[[Key[Array, ""]], PyTree],
    optimizer: optax.GradientTransformation,
    seed: int,
    layout: Layout | None = None,
) -> TrainState:
    """The state at step 0, of the parameters that ``init`` draws."""

    def state():
        params = init(jax.random.key(seed))
        return TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))

    return (layout or Layout()).initial(state)


def init_params(config: T5Config, seed: int) -> PyTree:
    """Fresh parameters, those of ``init_state``."""
    return jax.jit(lambda key: _fresh_params(config, key))(jax.random.key(seed))


def _fresh_params(config: T5Config, key: Key[Array, ""]) -> PyTree:
    tokens = jnp.zeros((1, 8), jnp.int32)
    variables = Transformer(config).init(key, tokens, tokens, tokens, enable_dropout=False)
    return variables["params"]


def make_train_step(
    config: T5Config,
    optimizer: optax.GradientTransformation,
    options: TrainOptions,
    teacher_config: T5Config | None = None,
) -> TrainStep:
    """The jitted step; it takes over (donates) the state that it is given.

    Its arguments are the state, the three arrays of a batch, the run's key (of
    which each step folds in its number) and the teacher's parameters or None.
    """
    model = Transformer(config)
    teacher_model = Transformer(teacher_config) if teacher_config else None

    def logits(params, inputs, key):
        return model.apply({"params": params}, *inputs, enable_dropout=True, rngs={"dropout": key})

    def teacher_logits(params, inputs):
        return teacher_model.apply({"params": params}, *inputs, enable_dropout=False)

    return distillation_step(logits, teacher_logits if teacher_model else None, optimizer, options)


def distillation_step(
    logits: Callable[[PyTree, Inputs, Key[Array, ""]], Array],
    teacher_logits: Callable[[PyTree, Inputs], Array] | None,
    optimizer: optax.GradientTransformation,
    options: TrainOptions,
) -> TrainStep:
    """``make_train_step`` for any network.

    Args:
        logits: of ``(params, inputs, dropout key)``, for each target token.
        teacher_logits: of ``(teacher's params, inputs)``; None without a teacher.
        optimizer, options: as there.
    """

    is_taught = teacher_logits is not None and options.learns_from_teacher

    def loss_fn(params, inputs, key, teacher_params):
        return token_losses(
            logits(params, inputs, key),
            inputs[2],
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            teacher_logits=teacher_logits(teacher_params, inputs) if is_taught else None,
            distillation_weight=options.distillation_weight,
            objective=options.objective,
        )

    return gradient_step(loss_fn, optimizer, options.accumulation_steps)


def gradient_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, accumulation_steps: int = 1
) -> TrainStep:
    """The jitted step down the mean of ``loss_fn(params, inputs, key, frozen) -> sums``.

    Nothing is learnt by ``frozen``, which comes in the place of the teacher's parameters.
    """
    gradient_fn = mean_gradient(loss_fn, accumulation_steps)

    def train_step(state, inputs, run_key, frozen):
        key = jax.random.fold_in(run_key, state.step)
        gradients, sums = gradient_fn(state.params, inputs, key, frozen)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # That of the clipping, which XLA computes once.
        sums = sums.replace(gradient_norm=optax.global_norm(gradients))
        return TrainState(state.step + 1, params, opt_state), sums

    return jax.jit(train_step, donate_argnums=0)


def make_eval_step(config: T5Config) -> Callable[[PyTree, Inputs], LossSums]:
    """The jitted loss of a batch without dropout, smoothing or z-loss."""
    model = Transformer(config)

    @jax.jit
    def eval_step(params, inputs):
        logits = model.apply({"params": params}, *inputs, enable_dropout=False)
        return token_losses(logits, inputs[2])

    return eval_step


def model_inputs(batch: Batch) -> Inputs:
    """The arrays of a batch in the model's order."""
    return (
        batch.encoder_input_tokens,
        batch.decoder_input_tokens,
        batch.decoder_target_tokens,
    )


def fit(
    config: T5Config,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    train_batches: Batches | Positioned,
    dev_batches: Batches | None,
    options: TrainOptions,
    directory: str | Path,
    teacher: Teacher | None = None,
    initial_params: PyTree | None = None,
    scorer: Scorer | None = None,
) -> TrainResult:
    """Trains to ``options.steps``, from the newest checkpoint if there is one.

    Args:
        config: the model.
        optimizer, schedule: the schedule is only shown; the optimizer has its own.
        train_batches: gives batch N to step N; of those that are ``Positioned``, the position
            is kept with every checkpoint.
        dev_batches: evaluated in one pass each period and at the end, or None.
        options: the loop's settings.
        directory: ``checkpoints/`` and ``metrics.jsonl`` are written in it.
        teacher: mixes its distributions into the loss.
        initial_params: what to go on from instead of random ones.
        scorer: scores what the model writes.

    Raises:
        InputError: the checkpoint in ``directory`` is of another model.
    """
    layout = make_layout(options, lambda mesh: param_shardings(config, mesh))
    state = init_state(config, optimizer, options.seed, layout)
    if initial_params is not None:
        # Copied: the first step donates them.
        state = state.replace(params=jax.tree.map(jnp.array, initial_params))
    return run_steps(
        state,
        make_train_step(config, optimizer, options, teacher and teacher.config),
        make_eval_step(config),
        schedule,
        train_batches,
        dev_batches,
        options,
        directory,
        frozen=teacher and layout.frozen(teacher.params, teacher.config),
        layout=layout,
        scorer=scorer,
    )


def make_layout(options: TrainOptions, shardings: Callable[[Mesh], PyTree]) -> Layout:
    """Over the devices that the options ask for; see ``Layout.create``."""
    return Layout.create(options.data_parallel, options.model_parallel, shardings)


def run_steps(
    state: TrainState,
    train_step: TrainStep,
    eval_step: Callable[[PyTree, Inputs], LossSums] | None,
    schedule: Schedule,
    train_batches: Batches | Positioned,
    dev_batches: Batches | None,
    options: TrainOptions,
    directory: str | Path,
    frozen: PyTree | None = None,
    make_inputs: MakeInputs | None = None,
    watch: Watch | None = None,
    layout: Layout | None = None,
    scorer: Scorer | None = None,
) -> TrainResult:
    """``fit`` for any parameters: the loop around a step of one's own.

    Args:
        state: fresh; the newest checkpoint, if there is one, takes its place.
        train_step, eval_step: jitted, see ``gradient_step`` and ``make_eval_step``; without
            dev_batches there is nothing to evaluate.
        schedule: shown.
        train_batches, dev_batches, options, directory: as in ``fit``.
        frozen: the step's last argument.
        make_inputs: from a batch, what a step is fed; None takes the batch as it is.
        watch: may end the run.
        layout: of the state, and of ``frozen``; None is the default device.
        scorer: as in ``fit``.

    Raises:
        InputError: the checkpoint in ``directory`` is of another model, or cannot be written,
            or the loss is not finite. The newest checkpoint stays.
    """
    deadline = time.monotonic() + 60.0 * (options.max_minutes or float("inf"))
    directory, layout = Path(directory).absolute(), layout or Layout()
    folder = directory / "checkpoints"
    with layout.within(), RunCheckpoints(folder, options.keep_checkpoints) as checkpoints:
        state = layout.placed(state)
        restored = checkpoints.restore(state)
        state = state if restored is None else restored.state
        start = int(state.step)
        with ProgressReporter(
            directory, start_step=start, steps=options.steps, tensorboard=options.tensorboard
        ) as reporter:
            if start:
                reporter.say(f"resumed at step {start}")
            loop = _Loop(
                train_step=layout.step(train_step, state),
                eval_step=eval_step,
                dev_batches=dev_batches,
                schedule=schedule,
                options=options,
                checkpoints=checkpoints,
                save_position=_save_position(train_batches),
                reporter=reporter,
                frozen=frozen and jax.device_put(frozen),
                make_inputs=make_inputs or (lambda state, step, batch: model_inputs(batch)),
                watch=watch,
                layout=layout,
                scorer=scorer,
            )
            window = LossWindow.of(restored.window if restored else {})
            batches = _resumed(train_batches, start, restored)
            result = loop.run(state, batches, window, deadline)
            # A checkpoint that cannot be written ends the run before anything is exported.
            checkpoints.finish()
            return result


def _save_position(train_batches: Batches | Positioned) -> Callable[[Path], None]:
    if isinstance(train_batches, Positioned):
        return train_batches.save_position
    fingerprint = train_batches.fingerprint

    def save(directory: Path) -> None:
        (directory / _FINGERPRINT_NAME).write_text(fingerprint)

    return save


def _resumed(
    train_batches: Batches | Positioned, start: int, restored: Restored | None
) -> Iterator[Batch]:
    """The batches from step ``start`` on, of what the checkpoint was trained on."""
    position = restored and restored.position
    file = position and position / _FINGERPRINT_NAME
    remedy = "give another output directory, or the data that it was trained on"
    if not isinstance(train_batches, Positioned):
        # Runs that began before anything was written of their batches have no position.
        if position and not (file.exists() and file.read_text() == train_batches.fingerprint):
            raise InputError(
                f"the checkpoint of step {start} is of other pairs, another seed or batches of "
                f"another size: {remedy}"
            )
        return iter(train_batches.batches(start))
    if restored and (position is None or file.exists()):
        raise InputError(f"the checkpoint of step {start} holds no position of this data: {remedy}")
    return iter(train_batches.batches(start, position))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
    """What stays the same while the state goes round."""

    train_step: TrainStep
    eval_step: Callable[[PyTree, Inputs], LossSums] | None
    dev_batches: Batches | None
    schedule: Schedule
    options: TrainOptions
    checkpoints: RunCheckpoints
    save_position: Callable[[Path], None]
    reporter: ProgressReporter
    frozen: PyTree | None
    make_inputs: MakeInputs
    watch: Watch | None
    layout: Layout
    scorer: Scorer | None

    def run(
        self, state: TrainState, batches: Iterator[Batch], window: LossWindow, deadline: float
    ) -> TrainResult:
        options, step, dev, evaluated = self.options, int(state.step), None, None
        metrics, scored = None, None
        # Another stream than the initialisation's.
        run_key = jax.random.key(options.seed + 1, impl=options.prng_impl)
        # The last step's sums, and which step it was.
        last: tuple[LossSums, StepTaken] | None = None
        if self.watch and step == 0:
            self._see(state)
        while not self._is_over(step) and time.monotonic() < deadline:
            batch = next(batches)
            inputs = self.make_inputs(state, step, batch)
            placed = self.layout.rows(inputs, options.accumulation_steps)
            state, sums = self.train_step(state, placed, run_key, self.frozen)
            step += 1
            # One step ahead of the device, no more.
            self._settle(last, window, state)
            last = sums, self._taken(step, inputs)
            self.reporter.count(step, batch.num_tokens, batch.num_pairs)
            if _is_due(step, options.log_period):
                self._settle(last, window, state)
                self._log(step, window)
                last, window = None, LossWindow()
            if _is_due(step, options.eval_period):
                self._settle(last, window, state)
                last = None
                dev, evaluated = self._evaluate(state), step
            if self.scorer and _is_due(step, self.scorer.period):
                self._settle(last, window, state)
                last = None
                metrics, scored = self._score(state), step
            if _is_due(step, options.checkpoint_period):
                self._settle(last, window, state)
                last = None
                self._save(state, window)
        self._settle(last, window, state)
        if evaluated != step:
            # Out of time, the run goes on later as though it had not stopped: what is measured
            # now is for the export alone.
            dev = self._evaluate(state) if self._is_over(step) else self._measured(state)
        # What cannot be measured is not kept either.
        if self.checkpoints.latest_step != step:
            self._save(state, window)
        # After the checkpoint: nothing of the training hangs on it, and it may take long.
        if self.scorer and scored != step and self._is_over(step):
            metrics = self._score(state)
        return TrainResult(state=state, dev=dev, finished=self._is_over(step), metrics=metrics)

    def _is_over(self, step: int) -> bool:
        return step >= self.options.steps or bool(self.watch and self.watch.is_over(step))

    def _taken(self, step: int, inputs: Inputs) -> StepTaken:
        source, _, target = inputs
        return StepTaken(
            number=step, schedule=self.schedule, source=source.shape, target=target.shape
        )

    def _settle(
        self, last: tuple[LossSums, StepTaken] | None, window: LossWindow, state: TrainState
    ) -> None:
        """Waits for a step and counts it in, or stops the run by it."""
        if last is None:
            return
        sums, taken = jax.device_get(last[0]), last[1]
        check_sums(sums, taken, state.params, self.checkpoints.what_stays)
        window.add(sums)

    def _log(self, step: int, window: LossWindow) -> None:
        self.reporter.report(
            step,
            loss=window.mean_loss,
            accuracy=window.accuracy,
            rate=float(self.schedule(step - 1)),
        )

    def _see(self, state: TrainState) -> None:
        with self.reporter.pause():
            self.watch.see(int(state.step), state.params, self.reporter)

    def _score(self, state: TrainState) -> dict[str, dict[str, float]]:
        with self.reporter.pause():
            return self.scorer.score(int(state.step), state.params, self.reporter)

    def _evaluate(self, state: TrainState) -> DevMetrics | None:
        metrics = self._measured(state)
        if self.watch:
            self._see(state)
        if metrics is not None:
            self.reporter.report_dev(int(state.step), metrics.cross_entropy, metrics.accuracy)
        return metrics

    def _measured(self, state: TrainState) -> DevMetrics | None:
        step = int(state.step)
        check_params(state.params, step, self.checkpoints.what_stays)
        if self.dev_batches is None:
            return None
        with self.reporter.pause():
            metrics = dev_metrics(
                lambda batch: self.eval_step(state.params, self.layout.rows(model_inputs(batch))),
                self.dev_batches.one_pass(),
            )
        check_measured(metrics.cross_entropy, "dev loss", step, self.checkpoints.what_stays)
        return metrics

    def _save(self, state: TrainState, window: LossWindow) -> None:
        step = int(state.step)
        check_params(state.params, step, self.checkpoints.what_stays)
        with self.reporter.pause():
            self.checkpoints.save(step, state, window.to_dict(), self.save_position)


def _is_due(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
