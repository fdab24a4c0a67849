"""Training of EAGLE heads by T5X, with the losses and the file format of ``spec-t5x distill``.

A head reads its target's states, which T5X's networks do not return. Target and head are therefore
the package's networks, over the parameters that T5X's trainer holds and shards.
``gin_configs/runs/t5x_distill_head.gin`` binds the same plug points as ``frozen_target`` names.
T5X's checkpoints have the head's own parameters; with each of them ``saving_head`` writes the head
in the package's format.
"""

from collections.abc import Mapping
from pathlib import Path

import flax.core
import jax
import jax.numpy as jnp
from t5x import models

from spec_t5x.errors import InputError
from spec_t5x.labs.t5x_training.distillation import DistillationModel, encoder_decoder_as
from spec_t5x.labs.t5x_training.frozen_target import COLLECTION, FrozenTarget, without_target
from spec_t5x.labs.training.exports import save_shared_draft
from spec_t5x.labs.training.first_head import first_head
from spec_t5x.labs.training.learners import read_target
from spec_t5x.labs.training.run_distill import KeptLayers
from spec_t5x.labs.training.student import Student
from spec_t5x.models.binding import abstract_variables
from spec_t5x.models.partitioning import gathered
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.shared_params import own_params
from spec_t5x.t5x_plugin.drafts import as_vocabulary
from spec_t5x.types import PyTree


def distill_head(
    model: models.BaseTransformerModel,
    target: FrozenTarget,
    layers: KeptLayers,
    objective: str = "jeffreys",
    weight: float = 1.0,
) -> "HeadDistillationModel":
    """Returns a model that trains an EAGLE head of the target; gin files bind ``MODEL`` to this.

    Args:
      model: a ``t5x.models.EncoderDecoderModel`` of the target's sizes, which gives vocabularies,
        optimizer and settings of the loss.
      target: the model whose states the head reads, and which it imitates.
      layers: the head's sizes, and over how many draft steps training unrolls it.
      objective: a name of ``distillation_losses.OBJECTIVES``.
      weight: of the objective, from 0 to 1; T5X's own loss has the weight ``1 - weight``.

    Raises:
      InputError: as ``distillation.distill`` does, or ``layers`` describes no head.
    """
    unused = ("loss_fn", "eval_fn", "get_initial_variables")
    made = encoder_decoder_as(HeadDistillationModel, model, unused)
    made.set_up(target, objective, weight)
    made.set_up_head(layers)
    return made


class HeadDistillationModel(DistillationModel):
    """Model of T5X whose draft is an EAGLE head; ``distill_head`` makes it.

    Batches must not be packed: a head's unrolled steps take one text in each row.
    """

    def set_up_head(self, layers: KeptLayers) -> None:
        """Checks ``layers``; makes the head's network, and a target that returns hidden states."""
        if not layers.unrolled_steps:
            raise InputError(
                "KeptLayers.unrolled_steps is 0: give the steps of drafting that a head learns, "
                "or gin_configs/runs/t5x_distill.gin for another draft"
            )
        if layers.draft_vocab_size is not None:
            raise InputError(
                f"KeptLayers.draft_vocab_size is {layers.draft_vocab_size}: leave it None under "
                "T5X, only spec-t5x distill counts the tokens of the texts"
            )
        config = self.target.config
        # Neither has parameters here: ``loss_fn`` gets those of both with each batch.
        self._target_read = T5Model.create({}, config).showing(layers.depths)
        self._student = Student(
            config=layers.head_config(config),
            params={},
            shared_layers=layers.of(config),
            unrolled_steps=layers.unrolled_steps,
        )

    def get_initial_variables(self, *args, **kwargs) -> Mapping[str, PyTree]:
        """Returns zeros for the head's own parameters (see ``first_params``), and their axes."""
        del args, kwargs
        variables = abstract_variables(self._student.config)
        own = {name: own_params(variables[name]) for name in ("params", "params_axes")}
        own["params"] = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), own["params"])
        return flax.core.freeze(own)

    def first_params(self, params, key, restore_target):
        """Returns a head made from the target (``first_head``), sharded as ``params``."""

        def first(key, target_params):
            of_head = self._student.config, self._student.shared_layers
            own = first_head(_typed(key), target_params, self.target.config, *of_head)
            return flax.core.freeze(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), own))

        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
        target_params = flax.core.unfreeze(restore_target())
        return jax.jit(first, out_shardings=shardings)(key, target_params)

    def _both_logits(self, params, target_params, batch, dropout_rng):
        if any(name.endswith("segment_ids") for name in batch):
            raise InputError(
                "an EAGLE head learns one text from each row and these are packed: set "
                "utils.DatasetConfig.pack = False, as gin_configs/runs/t5x_distill_head.gin does"
            )
        params, target_params = map(flax.core.unfreeze, (params, target_params))
        names = "encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens"
        inputs = tuple(batch[name] for name in names)
        reading = read_target(self._target_read.with_params(target_params), inputs)
        reading = jax.tree.map(jax.lax.stop_gradient, reading)
        key = None if dropout_rng is None else _typed(dropout_rng)
        given = params, target_params, inputs, reading, key
        return reading.logits, self._student.logits(*given)

    def save(self, directory: str | Path, params: PyTree, target_params: PyTree, step: int) -> None:
        """Writes the head as ``spec-t5x distill`` does; all processes call it, the first writes.

        Args:
          directory: its content is replaced.
          params: the head's own parameters.
          target_params: the norm of its decoder is stored, to recognize the target.
          step: stored with the head.
        """
        params = jax.tree.map(gathered, params)
        marks = jax.tree.map(gathered, {"decoder_norm": target_params["decoder"]["decoder_norm"]})
        if jax.process_index() == 0:
            target = self.target.loaded({"decoder": marks}, as_vocabulary(self.output_vocabulary))
            of_head = params, self._student.config, self._student.shared_layers, target
            options = {"dtype": "float32", "extra": {"step": step}, "overwrite": True}
            save_shared_draft(directory, *of_head, **options)


def saving_head(
    state_dict: PyTree, parameter_infos: PyTree, *, model: HeadDistillationModel, draft_dir: str
) -> tuple[PyTree, PyTree]:
    """Writes the head to ``draft_dir``, and returns what ``without_target`` returns.

    T5X calls this function at each save: ``SaveCheckpointConfig.state_transformation_fns``.

    Args:
      state_dict, parameter_infos: as T5X passes them.
      model: as ``distill_head`` returns it.
      draft_dir: a folder that the first process can write; its content is replaced.
    """
    target_params = state_dict["flax_mutables"][COLLECTION]
    step = int(jax.device_get(state_dict["state"]["step"]))
    model.save(draft_dir, state_dict["target"], target_params, step)
    return without_target(state_dict, parameter_infos)


def _typed(key: jax.Array) -> jax.Array:
    """Converts a raw key of T5X's (uint32) to a typed key of JAX's."""
    return jax.random.wrap_key_data(key)
