"""A T5X model that learns a target's distributions.

The model is the draft; T5X trains, evaluates and saves it as any other. Its losses also read the
frozen target's logits of the same batch, packed or not; both networks are T5X's own. The target's
parameters are beside the draft's in ``flax_mutables`` (``frozen_target``): they are an argument of
the compiled step, sharded over the mesh, and no optimizer updates them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import clu.metrics
import jax
import jax.numpy as jnp
from t5x import losses, models

from spec_t5x.errors import InputError, check_choice
from spec_t5x.labs.t5x_training.frozen_target import COLLECTION, FrozenTarget
from spec_t5x.labs.training.distillation_losses import CROSS_ENTROPY, DIVERGENCES, OBJECTIVES
from spec_t5x.sampling.distributions import argmax, overlap, sampling, standardize
from spec_t5x.t5x_plugin.remaking import remade
from spec_t5x.types import PAD_ID, Array, Float32, PyTree

Batch = Mapping[str, Array]
Metrics = dict[str, clu.metrics.Metric]
Logits = Float32[Array, "batch length vocab"]


def distill(
    model: models.BaseTransformerModel,
    target: FrozenTarget,
    objective: str = "forward_kl",
    weight: float = 1.0,
) -> "DistillationModel":
    """Returns the model as one that learns from a target; gin files bind ``MODEL`` to this.

    Network, vocabularies, optimizer, features, z-loss and label smoothing are the given model's.

    Args:
      model: the draft, a ``t5x.models.EncoderDecoderModel`` or of a subclass that has its losses.
      target: the model that the draft imitates.
      objective: a name of ``distillation_losses.OBJECTIVES``. With "cross_entropy" alpha is
        measured against the target, which is not learned from.
      weight: of the objective, from 0 to 1; T5X's own loss has the weight ``1 - weight``.

    Raises:
      InputError: a model that overrides the losses, settings out of range, or a target that
        embeds another number of ids.
    """
    made = encoder_decoder_as(DistillationModel, model, ("loss_fn", "eval_fn"))
    made.set_up(target, objective, weight)
    return made


def encoder_decoder_as(
    made: type["DistillationModel"], model: models.BaseTransformerModel, unused: tuple[str, ...]
) -> Any:
    """Returns an encoder-decoder as a ``made`` (``remade``); raises ``InputError`` for others."""
    if not isinstance(model, models.EncoderDecoderModel):
        raise InputError(
            f"model is a {type(model).__name__}: give a t5x.models.EncoderDecoderModel"
        )
    return remade(model, models.EncoderDecoderModel, made, unused)


class DistillationModel(models.EncoderDecoderModel):
    """``t5x.models.EncoderDecoderModel`` with a target; ``distill`` makes it.

    ``loss_fn`` and ``eval_fn`` take the target's parameters as T5X's mutable variables; the former
    returns them unchanged.
    """

    def set_up(self, target: FrozenTarget, objective: str, weight: float) -> None:
        """Checks and stores target and objective; ``remade`` calls no constructor."""
        check_choice("objective", objective, OBJECTIVES)
        if not 0 <= weight <= 1:
            raise InputError(f"the objective's weight is {weight}: give a number from 0 to 1")
        target.check_fits(self)
        self.target = target
        self._target_model = models.EncoderDecoderModel(
            target.module, self.input_vocabulary, self.output_vocabulary, optimizer_def=None
        )
        self._objective, self._weight = objective, weight

    def loss_fn(
        self,
        params: PyTree,
        batch: Batch,
        dropout_rng: jax.Array | None,
        flax_mutables: PyTree,
    ) -> tuple[Array, tuple[Metrics, PyTree]]:
        """Returns a batch's loss, and its metrics with ``flax_mutables``, which are unchanged.

        Args:
          params: the draft's.
          batch: T5X's features, packed or not.
          dropout_rng: for the draft, None for no dropout; the target has no dropout.
          flax_mutables: the target's parameters under ``frozen_target.COLLECTION``.
        """
        both = self._both_logits(params, flax_mutables[COLLECTION], batch, dropout_rng)
        loss, found = self._losses(*both, batch)
        return loss, (found, flax_mutables)

    def eval_fn(self, params: PyTree, batch: Batch, flax_mutables: PyTree) -> tuple[Array, Metrics]:
        """Returns the loss and metrics of ``loss_fn`` without dropout."""
        loss, (found, _) = self.loss_fn(params, batch, None, flax_mutables)
        return loss, found

    def first_params(
        self, params: PyTree, key: jax.Array, restore_target: Callable[[], PyTree]
    ) -> PyTree:
        """Returns the draft's parameters at the start of a training: ``params``, for this class.

        Args:
          params: T5X's initial parameters, random ones made from ``key``.
          key: T5X's random key.
          restore_target: reads the target's parameters onto the mesh.
        """
        del key, restore_target
        return params

    def _both_logits(
        self, params: PyTree, target_params: PyTree, batch: Batch, dropout_rng: jax.Array | None
    ) -> tuple[Logits, Logits]:
        """Returns float32 logits of the target, without gradient, and of the draft."""
        target_logits = self._target_model._compute_logits(target_params, batch)
        logits = self._compute_logits(params, batch, dropout_rng).astype(jnp.float32)
        return jax.lax.stop_gradient(target_logits.astype(jnp.float32)), logits

    def _losses(self, target_logits: Logits, logits: Logits, batch: Batch) -> tuple[Array, Metrics]:
        """Returns the loss, summed and normalised as T5X does, and all metrics."""
        targets = batch["decoder_target_tokens"]
        factor, weights = losses.get_loss_normalizing_factor_and_weights(
            self._loss_normalizing_factor, batch
        )
        text_loss, z_loss, _ = losses.compute_weighted_cross_entropy(
            logits,
            targets=targets,
            weights=weights,
            label_smoothing=self._label_smoothing,
            z_loss=self._z_loss,
            loss_normalizing_factor=factor,
        )
        is_token = targets != PAD_ID if weights is None else weights > 0
        loss, found = text_loss, {}
        if self._objective != CROSS_ENTROPY:
            divergences = DIVERGENCES[self._objective](target_logits, logits)
            found[self._objective] = _mean(divergences, is_token)
            weighted = divergences if weights is None else divergences * weights
            loss = jnp.sum(jnp.where(is_token, weighted, 0.0)) / (1.0 if factor is None else factor)
            # Multiplying the text's loss by 0 would still compute its gradient.
            if self._weight < 1.0:
                loss = (1.0 - self._weight) * text_loss + self._weight * loss
        found |= _alpha(target_logits, jax.lax.stop_gradient(logits), is_token)
        common = {
            "logits": logits,
            "targets": targets,
            "mask": weights,
            "segment_ids": _segment_ids(batch),
        }
        text = self._compute_metrics(**common, loss=text_loss, z_loss=z_loss)
        of_text = {n: m for n, m in text.items() if n.startswith(("cross_ent_loss", "z_loss"))}
        return loss, self._compute_metrics(**common, loss=loss) | of_text | found


def _alpha(target_logits: Array, logits: Array, is_token: Array) -> dict[str, clu.metrics.Average]:
    """Returns metrics of alpha (Corollary 3.6), means over tokens, at temperatures 1 and 0."""
    at_1 = sampling(1.0)
    betas = overlap(standardize(target_logits, at_1), standardize(logits, at_1))
    return {
        # Rounding may take a sum of probabilities above 1.
        "alpha/temperature_1": _mean(jnp.minimum(betas, 1.0), is_token),
        "alpha/temperature_0": _mean(argmax(target_logits) == argmax(logits), is_token),
    }


def _mean(values: Array, is_token: Array) -> clu.metrics.Average:
    # A product with the mask would be NaN where a model gives padding no probability.
    return clu.metrics.Average(
        total=jnp.sum(jnp.where(is_token, values, 0.0)),
        count=jnp.sum(is_token, dtype=jnp.int32),
    )


def _segment_ids(batch: Batch) -> dict[str, Array]:
    """Returns segment ids for T5X's counts of examples and padding; masks if there are none."""
    ending = "_segment_ids"
    packed = {name.removesuffix(ending): batch[name] for name in batch if name.endswith(ending)}
    features = ("encoder_input_tokens", "decoder_target_tokens")
    return packed or {name: batch[name] != PAD_ID for name in features if name in batch}
