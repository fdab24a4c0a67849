"""A T5X model that learns a target's distributions: what a gin include binds ``MODEL`` to.

The model is the draft; T5X trains, evaluates and saves it as any other. Its losses also
read the frozen target's logits of the same batch, packed or not: both networks are T5X's
own. The target's parameters come in beside the draft's, as ``flax_mutables``
(``frozen_target``), so that they are an argument of the compiled step, sharded over the
mesh, and nothing that an optimizer sees.
"""

from collections.abc import Callable, Mapping
from typing import Any

import clu.metrics
import jax
import jax.numpy as jnp
from t5x import losses, models

from spec_t5x.errors import InputError
from spec_t5x.labs.t5x_training.frozen_target import COLLECTION, FrozenTarget
from spec_t5x.labs.training.distillation_losses import CROSS_ENTROPY, DIVERGENCES, OBJECTIVES
from spec_t5x.sampling.distributions import argmax, overlap, sampling, standardize
from spec_t5x.t5x_plugin.remaking import remade
from spec_t5x.types import PAD_ID, Array, Float32, PyTree

Batch = Mapping[str, Array]


def distill(
    model: models.BaseTransformerModel,
    target: FrozenTarget,
    objective: str = "forward_kl",
    weight: float = 1.0,
) -> "DistillationModel":
    """The same model, learning from a target.

    Network, vocabularies, optimizer, features, z-loss and label smoothing are the given
    model's.

    Args:
      model: the draft, a ``t5x.models.EncoderDecoderModel`` or of a subclass that has its
        losses.
      target: what is imitated.
      objective: a name of ``distillation_losses.OBJECTIVES``. With "cross_entropy" the
        target is only measured against.
      weight: of the objective; the rest, one minus it, is T5X's own loss.

    Raises:
      InputError: a model with losses of its own, settings out of range, or a target that
        embeds another number of ids.
    """
    made = encoder_decoder_as(DistillationModel, model, ("loss_fn", "eval_fn"))
    made.set_up(target, objective, weight)
    return made


def encoder_decoder_as(
    made: type["DistillationModel"], model: models.BaseTransformerModel, unused: tuple[str, ...]
) -> Any:
    """``remade`` of a ``t5x.models.EncoderDecoderModel``.

    Raises:
      InputError: another model, or as of ``remade``.
    """
    if not isinstance(model, models.EncoderDecoderModel):
        raise InputError(
            f"model is a {type(model).__name__}: give a t5x.models.EncoderDecoderModel"
        )
    return remade(model, models.EncoderDecoderModel, made, unused)


class DistillationModel(models.EncoderDecoderModel):
    """``t5x.models.EncoderDecoderModel`` with a target. ``distill`` makes one of a stock model.

    ``loss_fn`` and ``eval_fn`` take the target's parameters as T5X hands mutable variables
    over, and give them back as they are.
    """

    def set_up(self, target: FrozenTarget, objective: str, weight: float) -> None:
        """What this model has beyond the stock one's attributes."""
        if objective not in OBJECTIVES:
            raise InputError(f"objective is {objective!r}: give one of {', '.join(OBJECTIVES)}")
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
    ) -> tuple[Array, tuple[dict[str, clu.metrics.Metric], PyTree]]:
        """T5X's loss and metrics of a batch, and ``flax_mutables`` as they came.

        Args:
          params: the draft's.
          batch: as of the stock model.
          dropout_rng: None for no dropout; the target has none anyway.
          flax_mutables: the target's parameters under ``frozen_target.COLLECTION``.
        """
        both = self._both_logits(params, flax_mutables[COLLECTION], batch, dropout_rng)
        loss, found = self._losses(*both, batch)
        return loss, (found, flax_mutables)

    def first_params(
        self, params: PyTree, key: jax.Array, restore_target: Callable[[], PyTree]
    ) -> PyTree:
        """Where a training from scratch starts.

        Args:
          params: random ones.
          key: what they were made of.
          restore_target: reads the target's parameters onto the mesh.
        """
        del key, restore_target
        return params

    def eval_fn(
        self, params: PyTree, batch: Batch, flax_mutables: PyTree
    ) -> tuple[Array, dict[str, clu.metrics.Metric]]:
        """``loss_fn`` without dropout."""
        loss, (found, _) = self.loss_fn(params, batch, None, flax_mutables)
        return loss, found

    def _both_logits(
        self, params: PyTree, target_params: PyTree, batch: Batch, dropout_rng: jax.Array | None
    ) -> tuple[Float32[Array, "batch length vocab"], Float32[Array, "batch length vocab"]]:
        """The target's and the draft's."""
        target_logits = self._target_model._compute_logits(target_params, batch)
        logits = self._compute_logits(params, batch, dropout_rng).astype(jnp.float32)
        return jax.lax.stop_gradient(target_logits.astype(jnp.float32)), logits

    def _losses(
        self,
        target_logits: Float32[Array, "batch length vocab"],
        logits: Float32[Array, "batch length vocab"],
        batch: Batch,
    ) -> tuple[Array, dict[str, clu.metrics.Metric]]:
        """The loss, summed and normalised as T5X does, and all metrics."""
        targets = batch["decoder_target_tokens"]
        factor, weights = losses.get_loss_normalizing_factor_and_weights(
            self._loss_normalizing_factor, batch
        )
        of_text, z_loss, _ = losses.compute_weighted_cross_entropy(
            logits,
            targets=targets,
            weights=weights,
            label_smoothing=self._label_smoothing,
            z_loss=self._z_loss,
            loss_normalizing_factor=factor,
        )
        is_token = targets != PAD_ID if weights is None else weights > 0
        loss, found = of_text, {}
        if self._objective != CROSS_ENTROPY:
            divergences = DIVERGENCES[self._objective](target_logits, logits)
            found[self._objective] = _mean(divergences, is_token)
            total = jnp.sum(jnp.where(is_token, divergences * _or_one(weights), 0.0))
            total /= _or_one(factor)
            # Not 0 times the other, whose gradient would take a pass of its own.
            whole = self._weight == 1.0
            loss = total if whole else (1.0 - self._weight) * of_text + self._weight * total
        found |= _alpha(target_logits, jax.lax.stop_gradient(logits), is_token)

        def stock(**losses):
            return self._compute_metrics(
                logits=logits,
                targets=targets,
                mask=weights,
                segment_ids=_segment_ids(batch),
                **losses,
            )

        text = {
            name: metric
            for name, metric in stock(loss=of_text, z_loss=z_loss).items()
            if name.startswith(("cross_ent_loss", "z_loss"))
        }
        return loss, stock(loss=loss) | text | found


def _alpha(target_logits: Array, logits: Array, is_token: Array) -> dict[str, clu.metrics.Average]:
    """alpha (Corollary 3.6) at temperatures 1 and 0."""
    at_1 = sampling(1.0)
    betas = overlap(standardize(target_logits, at_1), standardize(logits, at_1))
    return {
        # Sums of probabilities, rounded.
        "alpha/temperature_1": _mean(jnp.minimum(betas, 1.0), is_token),
        "alpha/temperature_0": _mean(argmax(target_logits) == argmax(logits), is_token),
    }


def _mean(values: Array, is_token: Array) -> clu.metrics.Average:
    # Chosen, not multiplied: a model may give padding no chance at all.
    return clu.metrics.Average(
        total=jnp.sum(jnp.where(is_token, values, 0.0)),
        count=jnp.sum(is_token, dtype=jnp.int32),
    )


def _or_one(value: Any) -> Any:
    return 1.0 if value is None else value


def _segment_ids(batch: Batch) -> dict[str, Array]:
    """What T5X counts examples and padding by: of packed batches, or of what is no padding."""
    ending = "_segment_ids"
    packed = {name.removesuffix(ending): batch[name] for name in batch if name.endswith(ending)}
    features = ("encoder_input_tokens", "decoder_target_tokens")
    return packed or {name: batch[name] != PAD_ID for name in features if name in batch}
