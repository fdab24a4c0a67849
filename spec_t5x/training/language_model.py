"""A language model's steps: next tokens of lines, from the text or from a teacher."""

import jax
import jax.numpy as jnp
import optax

from spec_t5x.errors import InputError
from spec_t5x.models.gpt import GPT, GPTConfig
from spec_t5x.training.layout import Layout
from spec_t5x.training.losses import token_losses
from spec_t5x.training.trainer import (
    TrainOptions,
    TrainState,
    TrainStep,
    distillation_step,
    fresh_state,
)


def init_state(
    config: GPTConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    layout: Layout | None = None,
) -> TrainState:
    """Fresh parameters and optimizer state at step 0."""

    def init(key):
        tokens = jnp.zeros((1, 8), jnp.int32)
        return GPT(config).init(key, tokens, enable_dropout=False)["params"]

    return fresh_state(init, optimizer, seed, layout)


def make_train_step(
    config: GPTConfig,
    optimizer: optax.GradientTransformation,
    options: TrainOptions,
    teacher_config: GPTConfig | None = None,
) -> TrainStep:
    """The jitted step; as ``trainer.make_train_step``, of batches without a source."""
    if options.label_smoothing:
        # Its mean would take in the start token's logit, which is masked.
        raise InputError(
            f"label_smoothing is {options.label_smoothing}: leave it 0 for a language model"
        )
    model = GPT(config)
    teacher = GPT(teacher_config) if teacher_config else None

    def logits(params, inputs, key):
        return model.apply({"params": params}, inputs[1], rngs={"dropout": key})

    def teacher_logits(params, inputs):
        return teacher.apply({"params": params}, inputs[1], enable_dropout=False)

    return distillation_step(logits, teacher_logits if teacher else None, optimizer, options)


def make_eval_step(config: GPTConfig):
    """The jitted loss of a batch without dropout, smoothing or z-loss."""
    model = GPT(config)

    @jax.jit
    def eval_step(params, inputs):
        _, shifted, targets = inputs
        logits = model.apply({"params": params}, shifted, enable_dropout=False)
        return token_losses(logits, targets)

    return eval_step
