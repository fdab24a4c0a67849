"""Target that a draft learns from under T5X's trainer: it is read and sharded, but never saved.

T5X's train state has ``flax_mutables``, variables without an optimizer, which the trainer passes to
the model's losses and takes back. They hold the target's parameters. Initialization, restoring and
saving see the draft alone, so that its checkpoints are those of any T5X training; a resumed run
reads the target again, by the package's own readers.

``gin_configs/runs/t5x_distill.gin`` binds four plug points of T5X: ``MODEL``
(``distillation.distill``), ``train.train_state_initializer_cls`` (``DraftInitializer``),
``train.trainer_cls`` (``trainer_with_target``) and the save's
``state_transformation_fns`` (``without_target``).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import jax
from t5x import models, partitioning, train_state, trainer, utils

from spec_t5x.checkpoints.loading import open_model
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.checkpoints.storage.vocabularies import choose_vocabulary
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.labs.t5x_training.stock_network import t5x_network
from spec_t5x.models.binding import abstract_variables
from spec_t5x.models.t5 import T5Config
from spec_t5x.t5x_plugin.drafts import as_vocabulary
from spec_t5x.types import PyTree

# Name of the target's parameters among the train state's ``flax_mutables``.
COLLECTION = "target"


class FrozenTarget:
    """Checkpoint of a target, in any format that the package reads, and a T5X network for it."""

    def __init__(self, path: str, dtype: str = "bfloat16"):
        """Opens the checkpoint; ``restore`` reads the weights.

        Args:
          path: a checkpoint in T5X's, Hugging Face's or the project's format, here or in
            gs://, or a packaged name.
          dtype: of the parameters and of the computation.

        Raises:
          InputError: there is no checkpoint, or it has no T5 encoder-decoder.
        """
        self._stored = open_model(path)
        if not isinstance(self._stored.config, T5Config):
            raise InputError(
                f"{path} is a {type(self._stored.config).__name__}: give an encoder-decoder"
            )
        self._dtype = dtype
        self.config = dataclasses.replace(self._stored.config, dtype=dtype, dropout_rate=0.0)
        self.module = t5x_network(self.config)

    def check_fits(self, draft: models.EncoderDecoderModel) -> None:
        """Raises ``InputError`` unless draft and target have the same vocabulary and ids."""
        stored, num_ids = self._stored, draft.module.config.vocab_size
        if num_ids != stored.config.vocab_size:
            raise InputError(
                f"the draft embeds {num_ids} ids and the target {stored.directory} "
                f"{stored.config.vocab_size}: give a draft padded to the target's size"
            )
        if stored.vocabulary is not None:
            given = as_vocabulary(draft.output_vocabulary)
            choose_vocabulary(given, stored.vocabulary, stored.directory, num_ids)

    def loaded(self, params: PyTree, vocabulary: Vocabulary) -> LoadedModel:
        """Returns the target with these parameters as a model of this package.

        ``vocabulary`` is the launch's, which is used if the checkpoint has none.
        """
        return LoadedModel(
            params=params,
            config=self.config,
            vocabulary=self._stored.vocabulary or vocabulary,
            directory=self._stored.directory,
            metadata={},
        )

    def mesh_axes(self, partitioner: partitioning.BasePartitioner) -> PyTree:
        """Returns the ``PartitionSpec`` of each parameter, by T5X's rules."""
        variables = flax.core.freeze(abstract_variables(self._stored.config))
        state = train_state.InferenceState.create(variables)
        return partitioner.get_mesh_axes(state).params

    def restore(self, partitioner: partitioning.BasePartitioner) -> PyTree:
        """Reads the parameters onto the partitioner's mesh; each device reads its shards."""
        shardings = jax.tree.map(
            lambda axes: jax.sharding.NamedSharding(partitioner.mesh, axes or jax.P()),
            flax.core.unfreeze(self.mesh_axes(partitioner)),
            is_leaf=lambda axes: axes is None,
        )
        return flax.core.freeze(self._stored.read_params(dtype=self._dtype, shardings=shardings))


class DraftInitializer:
    """Initializer of T5X's train state: the draft's, with the target in ``train_state_axes``.

    ``train.train_state_initializer_cls`` is bound to this class.
    """

    def __init__(
        self,
        optimizer_def: Any,
        init_fn: Callable[..., PyTree],
        input_shapes: Mapping[str, Any],
        partitioner: partitioning.BasePartitioner,
        input_types: Mapping[str, Any] | None = None,
    ):
        """Takes the arguments of T5X's class; ``init_fn`` is a ``DistillationModel``'s method."""
        self._of_draft = utils.TrainStateInitializer(
            optimizer_def, init_fn, input_shapes, partitioner, input_types
        )
        self.global_train_state_shape = self._of_draft.global_train_state_shape
        self._model, self._partitioner = getattr(init_fn, "__self__", None), partitioner
        axes = _target_of(self._model).mesh_axes(partitioner)
        self.train_state_axes = _with_target(self._of_draft.train_state_axes, axes)

    def from_scratch(self, init_rng: jax.Array) -> train_state.TrainState:
        """Returns T5X's initial state of the draft, with parameters from ``first_params``."""
        state = self._of_draft.from_scratch(init_rng)
        read = functools.partial(self._model.target.restore, self._partitioner)
        return state.replace_params(self._model.first_params(state.params, init_rng, read))


def trainer_with_target(
    model: models.BaseModel,
    train_state: train_state.TrainState,
    partitioner: partitioning.BasePartitioner,
    *,
    trainer_cls: Callable[..., trainer.BaseTrainer],
    **kwargs: Any,
) -> trainer.BaseTrainer:
    """Makes T5X's trainer with the target in its state; ``train.trainer_cls`` is bound to this.

    Args:
      model: as ``distillation.distill`` returns it.
      train_state: the draft's.
      partitioner: shards draft and target.
      trainer_cls: T5X's ``Trainer``, or another class with its constructor.
      **kwargs: further arguments of ``trainer_cls``.
    """
    state = _with_target(train_state, _target_of(model).restore(partitioner))
    return trainer_cls(model=model, train_state=state, partitioner=partitioner, **kwargs)


def without_target(state_dict: PyTree, parameter_infos: PyTree) -> tuple[PyTree, PyTree]:
    """Removes the target (``flax_mutables``) from a state dictionary that T5X is to save."""
    of_draft = {name: part for name, part in state_dict.items() if name != "flax_mutables"}
    return of_draft, parameter_infos


def _with_target(state: train_state.TrainState, target: PyTree) -> train_state.TrainState:
    return state.replace_flax_mutables(flax.core.freeze({COLLECTION: target}))


def _target_of(model: Any) -> FrozenTarget:
    target = getattr(model, "target", None)
    if not isinstance(target, FrozenTarget):
        raise InputError(
            f"MODEL is a {type(model).__name__}: bind it to distillation.distill, as "
            "gin_configs/runs/t5x_distill.gin does"
        )
    return target
