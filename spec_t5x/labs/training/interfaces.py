"""Interfaces of the training loop (``trainer``): options, training batches, and learners."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from spec_t5x.errors import InputError, check_at_least, check_choice
from spec_t5x.labs.training.batching import PairBatch
from spec_t5x.labs.training.distillation_losses import CROSS_ENTROPY, OBJECTIVES
from spec_t5x.labs.training.held_out_alpha import HeldOutAlpha
from spec_t5x.labs.training.losses import DevMetrics, LossSums
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.options import check_types
from spec_t5x.types import Array, Int, Key, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Settings of the training loop. Periods are in steps; a period of 0 disables its action."""

    steps: int
    seed: int = 0
    label_smoothing: float = 0.0
    z_loss: float = 1e-4
    # For drafts and heads: the divergence from the target to minimize
    # (``distillation_losses.OBJECTIVES``), and its weight in the loss, 0..1; the cross-entropy of
    # the text has the remaining weight.
    objective: str = "forward_kl"
    distillation_weight: float = 0.5
    log_period: int = 50
    eval_period: int = 1000
    checkpoint_period: int = 1000
    keep_checkpoints: int = 2
    # Number of parts of a batch that are computed in turn, to save memory, for one optimizer step.
    accumulation_steps: int = 1
    # Number of devices that share one copy of the parameters, and number of copies, each of which
    # computes a share of a batch's rows. None makes as many copies as the devices allow.
    model_parallel: int = 1
    data_parallel: int | None = None
    # Says whether to write curves to OUTPUT_DIR/tensorboard as well, which needs TensorFlow.
    tensorboard: bool = False
    # Minutes of training after which this process stops and exports the current parameters. The
    # time in which texts are read, and written by a target, is not counted. None is no limit.
    max_minutes: float | None = None

    def __post_init__(self):
        check_types(self)
        counts = ("steps", "accumulation_steps", "model_parallel", "data_parallel")
        check_at_least(self, **dict.fromkeys((*counts, "keep_checkpoints"), 1))
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise InputError(f"max_minutes is {self.max_minutes}: give a number above 0, or None")
        if not 0.0 <= self.distillation_weight <= 1.0:
            weight = self.distillation_weight
            raise InputError(f"distillation_weight is {weight}: give a number from 0 to 1")
        check_choice("objective", self.objective, OBJECTIVES)

    @property
    def uses_target(self) -> bool:
        """Says whether the loss of a draft or of heads uses the target's distributions."""
        return self.objective != CROSS_ENTROPY and self.distillation_weight > 0


# Ids of the source, of the target text shifted right, and of the target text; of packed rows also
# the segment ids of source and text.
Inputs = tuple[Int[Array, "batch _"], ...]
# A result on held-out data. Its ``value`` must be finite; ``Learner.keeps_best`` keeps the largest.
Measurement = DevMetrics | HeldOutAlpha


@runtime_checkable
class Positioned(Protocol):
    """Training batches whose position can be saved: ``Batches``, ``task_streams.TaskStream``.

    Every checkpoint holds the position, because a stream can reach batch N only by reading.
    """

    def save_position(self, directory: Path) -> None:
        """Writes the position after the batches yielded so far to the empty ``directory``."""

    def batches(self, start_step: int = 0, position: Path | None = None) -> Iterator[PairBatch]:
        """Yields batch ``start_step``, ``start_step + 1``, ... without end.

        ``position`` is a directory that ``save_position`` wrote after ``start_step`` batches. It
        may be deleted after the second batch.
        """


class Learner(abc.ABC):
    """A training objective: initial parameters, loss and evaluation; a base class."""

    options: TrainOptions
    # A model that the loss uses and does not train, with parameters ``target_params``; or None.
    target: CachedModel | None
    # True evaluates step 0 as well, and keeps the checkpoint of the largest first measurement.
    keeps_best = False
    # With ``keeps_best``: steps without a larger value after which the run ends; 0 disables it.
    patience: int = 0

    @abc.abstractmethod
    def init(self, key: Key[Array, ""]) -> PyTree:
        """Returns the parameters at step 0."""

    @abc.abstractmethod
    def shardings(self, mesh: Mesh) -> PyTree:
        """Returns a ``NamedSharding`` for each parameter."""

    @abc.abstractmethod
    def loss(
        self,
        params: PyTree,
        inputs: Inputs,
        key: Key[Array, ""] | None,
        target_params: PyTree | None,
    ) -> LossSums:
        """Sums the loss over a batch's tokens, with dropout if ``key`` is given (in training)."""

    def inputs(
        self, params: PyTree, target_params: PyTree | None, step: int, batch: PairBatch
    ) -> Inputs:
        """Returns the arrays to train on in ``step``: the batch's, unless overridden."""
        return model_inputs(batch)

    def evaluate(
        self,
        params: PyTree,
        target_params: PyTree | None,
        dev: Any,
        place: Callable[[Inputs], Inputs],
    ) -> Sequence[Measurement]:
        """Measures ``params`` on ``dev``, the held-out data of ``trainer.fit``, here ``Batches``.

        ``place`` puts a batch's rows on the devices. The result here is one ``DevMetrics``.
        """
        # The sums are fetched after the loop, so that the device never waits for the host.
        sums = [
            self._eval_step(params, place(model_inputs(batch)), target_params)
            for batch in dev.one_pass()
        ]
        return [DevMetrics.of(jax.device_get(sums))]

    @functools.cached_property
    def _eval_step(self):
        def eval_step(params, inputs, target_params):
            sums = self.loss(params, inputs, None, target_params)
            # The loss is not returned, so that XLA drops its regularizers.
            return sums.cross_entropy, sums.num_correct, sums.num_tokens

        return jax.jit(eval_step)


def model_inputs(batch: PairBatch) -> Inputs:
    """Returns the arrays of a batch in the order of a network's arguments."""
    return (
        batch.encoder_input_tokens,
        batch.decoder_input_tokens,
        batch.decoder_target_tokens,
        *(batch.segment_ids or ()),
    )
