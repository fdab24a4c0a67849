"""The training loop: one jitted step, checkpoints, exact resumption.

A run is a function of its options and seed alone. Batch and dropout key follow
from the step, so that a run that was killed and started again ends with the very
parameters of an undisturbed one.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from spec_t5x.data.batching import Batch, Batches
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.training.distillation_losses import CROSS_ENTROPY, OBJECTIVES
from spec_t5x.training.evaluate import DevMetrics, dev_metrics
from spec_t5x.training.losses import LossSums, mean_loss, token_losses
from spec_t5x.training.progress import ProgressReporter
from spec_t5x.training.schedules import Schedule
from spec_t5x.types import Array, Int, Key, PyTree


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
    max_minutes: float | None = None  # of this process; then stop and export
    # 'rbg' makes dropout masks several times faster than 'threefry2x32' on CPUs.
    prng_impl: str = "rbg"

    def __post_init__(self):
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}: give 1 or more")
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


def init_state(config: T5Config, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Fresh parameters and optimizer state at step 0."""

    def init(key):
        params = _fresh_params(config, key)
        return TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))

    return jax.jit(init)(jax.random.key(seed))


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
        sums = token_losses(
            logits(params, inputs, key),
            inputs[2],
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            teacher_logits=teacher_logits(teacher_params, inputs) if is_taught else None,
            distillation_weight=options.distillation_weight,
            objective=options.objective,
        )
        return mean_loss(sums), sums

    return gradient_step(loss_fn, optimizer)


def gradient_step(
    loss_fn: Callable[[PyTree, Inputs, Key[Array, ""], PyTree | None], tuple[Array, LossSums]],
    optimizer: optax.GradientTransformation,
) -> TrainStep:
    """The jitted step down ``loss_fn(params, inputs, key, frozen) -> (mean, sums)``.

    Nothing is learnt by ``frozen``, which comes in the place of the teacher's parameters.
    """

    def train_step(state, inputs, run_key, frozen):
        key = jax.random.fold_in(run_key, state.step)
        gradient_fn = jax.grad(loss_fn, has_aux=True)
        gradients, sums = gradient_fn(state.params, inputs, key, frozen)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
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
    train_batches: Batches,
    dev_batches: Batches | None,
    options: TrainOptions,
    directory: str | Path,
    teacher: Teacher | None = None,
    initial_params: PyTree | None = None,
) -> TrainResult:
    """Trains to ``options.steps``, from the newest checkpoint if there is one.

    Args:
        config: the model.
        optimizer, schedule: the schedule is only shown; the optimizer has its own.
        train_batches: gives batch N to step N.
        dev_batches: evaluated in one pass each period and at the end, or None.
        options: the loop's settings.
        directory: ``checkpoints/`` and ``metrics.jsonl`` are written in it.
        teacher: mixes its distributions into the loss.
        initial_params: what to go on from instead of random ones.

    Raises:
        InputError: the checkpoint in ``directory`` is of another model.
    """
    state = init_state(config, optimizer, options.seed)
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
        frozen=teacher and teacher.params,
    )


def run_steps(
    state: TrainState,
    train_step: TrainStep,
    eval_step: Callable[[PyTree, Inputs], LossSums] | None,
    schedule: Schedule,
    train_batches: Batches,
    dev_batches: Batches | None,
    options: TrainOptions,
    directory: str | Path,
    frozen: PyTree | None = None,
    make_inputs: MakeInputs | None = None,
    watch: Watch | None = None,
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

    Raises:
        InputError: the checkpoint in ``directory`` is of another model.
    """
    deadline = time.monotonic() + 60.0 * (options.max_minutes or float("inf"))
    directory = Path(directory).absolute()
    with _checkpoint_manager(directory, options) as manager:
        state = _restore(manager, state)
        start = int(state.step)
        with ProgressReporter(directory, start_step=start, steps=options.steps) as reporter:
            if start:
                reporter.say(f"resumed at step {start}")
            loop = _Loop(
                train_step=train_step,
                eval_step=eval_step,
                dev_batches=dev_batches,
                schedule=schedule,
                options=options,
                manager=manager,
                reporter=reporter,
                frozen=frozen and jax.device_put(frozen),
                make_inputs=make_inputs or (lambda state, step, batch: model_inputs(batch)),
                watch=watch,
            )
            return loop.run(state, train_batches.batches(start), deadline)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
    """What stays the same while the state goes round."""

    train_step: TrainStep
    eval_step: Callable[[PyTree, Inputs], LossSums] | None
    dev_batches: Batches | None
    schedule: Schedule
    options: TrainOptions
    manager: ocp.CheckpointManager
    reporter: ProgressReporter
    frozen: PyTree | None
    make_inputs: MakeInputs
    watch: Watch | None

    def run(self, state: TrainState, batches: Iterable[Batch], deadline: float) -> TrainResult:
        options, step, dev, evaluated = self.options, int(state.step), None, None
        # Another stream than the initialisation's.
        run_key = jax.random.key(options.seed + 1, impl=options.prng_impl)
        logged: list[LossSums] = []
        batches = iter(batches)
        if self.watch and step == 0:
            self._see(state)
        while not self._is_over(step) and time.monotonic() < deadline:
            batch = next(batches)
            inputs = self.make_inputs(state, step, batch)
            state, sums = self.train_step(state, inputs, run_key, self.frozen)
            step += 1
            if logged:  # one step ahead of the device, no more
                jax.block_until_ready(logged[-1])
            logged.append(sums)
            self.reporter.count(step, batch.num_tokens, batch.num_pairs)
            if _is_due(step, options.log_period):
                self._log(step, logged)
                logged = []
            if _is_due(step, options.eval_period):
                dev, evaluated = self._evaluate(state), step
            if _is_due(step, options.checkpoint_period):
                self._save(state)
        if self.manager.latest_step() != step:
            self._save(state)
        if evaluated != step:
            dev = self._evaluate(state)
        return TrainResult(state=state, dev=dev, finished=self._is_over(step))

    def _is_over(self, step: int) -> bool:
        return step >= self.options.steps or bool(self.watch and self.watch.is_over(step))

    def _log(self, step: int, logged: list[LossSums]) -> None:
        # Fetched, then added in float64: a jitted sum would compile for each length.
        parts = jax.device_get(logged)
        tokens = max(sum(float(part.num_tokens) for part in parts), 1.0)
        self.reporter.report(
            step,
            loss=sum(float(part.loss) for part in parts) / tokens,
            accuracy=sum(float(part.num_correct) for part in parts) / tokens,
            rate=float(self.schedule(step - 1)),
        )

    def _see(self, state: TrainState) -> None:
        with self.reporter.pause():
            self.watch.see(int(state.step), state.params, self.reporter)

    def _evaluate(self, state: TrainState) -> DevMetrics | None:
        if self.watch:
            self._see(state)
        if self.dev_batches is None:
            return None
        with self.reporter.pause():
            metrics = dev_metrics(
                lambda batch: self.eval_step(state.params, model_inputs(batch)),
                self.dev_batches.one_pass(),
            )
        self.reporter.report_dev(int(state.step), metrics.cross_entropy, metrics.accuracy)
        return metrics

    def _save(self, state: TrainState) -> None:
        with self.reporter.pause():
            self.manager.save(int(state.step), args=ocp.args.StandardSave(state))
            # The next step donates these very buffers, so the writer must be done.
            self.manager.wait_until_finished()


def _is_due(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


def _checkpoint_manager(directory: Path, options: TrainOptions) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        directory / "checkpoints",
        options=ocp.CheckpointManagerOptions(max_to_keep=options.keep_checkpoints, create=True),
    )


def _restore(manager: ocp.CheckpointManager, state: TrainState) -> TrainState:
    """The newest checkpoint, or ``state`` if there is none."""
    latest = manager.latest_step()
    if latest is None:
        return state
    try:
        return manager.restore(latest, args=ocp.args.StandardRestore(state))
    except ValueError as error:
        raise InputError(
            f"the checkpoint of step {latest} in {manager.directory} is of another "
            "model or optimizer: give another output directory"
        ) from error
