"""Training of draft heads, with their target frozen.

Head i learns the target's own distribution of the token that is i + 1 places further:
soft labels, since speculative decoding accepts by the overlap of the two distributions,
whatever the text says. The target reads each pair once, teacher-forced, for the states
that the heads take and for the distributions that they learn.
"""

import functools
import operator
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from spec_t5x.data.batching import Batches
from spec_t5x.models.heads import Heads, HeadsConfig, T5Heads
from spec_t5x.models.partitioning import declared_shardings
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.training.layout import Layout
from spec_t5x.training.losses import LossSums, token_losses
from spec_t5x.training.schedules import Schedule
from spec_t5x.training.trainer import (
    Inputs,
    TrainOptions,
    TrainResult,
    TrainState,
    fresh_state,
    gradient_step,
    make_layout,
    run_steps,
)
from spec_t5x.types import Array, Float, Float32, Key, PyTree


def fit_heads(
    target: T5Model,
    config: HeadsConfig,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    train_batches: Batches,
    dev_batches: Batches | None,
    options: TrainOptions,
    directory: str | Path,
) -> TrainResult:
    """``trainer.fit`` for the heads of a target.

    ``result.state.params`` are the heads' alone. Losses and accuracies are means over the
    heads; ``options.distillation_weight`` is the share of the target's distributions in
    the loss, against the text, and ``options.objective`` how they are learnt.

    Raises:
        InputError: the checkpoint in ``directory`` is of other heads.
    """

    def losses(params, target_params, inputs, **learnt):
        frozen = target.replace(params=target_params)
        heads = T5Heads.create(params, frozen)
        return heads_losses(heads, frozen, inputs, **learnt)

    def loss_fn(params, inputs, key, target_params):
        del key  # the heads have no dropout
        return losses(
            params,
            target_params,
            inputs,
            distillation_weight=options.distillation_weight * options.learns_from_teacher,
            objective=options.objective,
        )

    layout = make_layout(options, functools.partial(_param_shardings, config))
    target = target.replace(params=layout.frozen(target.params, target.config))
    eval_step = jax.jit(losses)
    return run_steps(
        init_heads(config, optimizer, options.seed, layout),
        gradient_step(loss_fn, optimizer, options.accumulation_steps),
        lambda params, inputs: eval_step(params, target.params, inputs),
        schedule,
        train_batches,
        dev_batches,
        options,
        directory,
        frozen=target.params,
        layout=layout,
    )


def init_heads(
    config: HeadsConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    layout: Layout | None = None,
) -> TrainState:
    """Heads that say what the target says one token too early, at step 0."""
    return fresh_state(lambda key: _init(config, key)["params"], optimizer, seed, layout)


def _init(config: HeadsConfig, key: Key[Array, ""]) -> PyTree:
    state = jnp.zeros((1, 1, config.emb_dim))
    return Heads(config).init(key, state, state, config.num_heads)


def _param_shardings(config: HeadsConfig, mesh: Mesh) -> PyTree:
    shapes = jax.eval_shape(functools.partial(_init, config), jax.random.key(0))
    return declared_shardings(shapes["params"], shapes["params_axes"], mesh)


def heads_losses(
    heads: T5Heads,
    target: T5Model,
    inputs: Inputs,
    *,
    distillation_weight: float = 0.0,
    objective: str = "forward_kl",
) -> LossSums:
    """Losses summed over heads and tokens.

    Args:
        heads: bound to ``target``.
        target: gives states and, where ``distillation_weight`` is not 0, labels.
        inputs: a batch's, in the order of ``trainer.model_inputs``.
        distillation_weight, objective: see ``losses.token_losses``.
    """
    text = inputs[2]
    states, target_logits = _read(target, inputs)
    of_heads = heads.head_states(states, text, heads.num_heads)
    sums = []
    for i in range(heads.num_heads):
        # From the state of token t, and from the token: token t + 1 + i.
        ahead = min(i + 1, text.shape[1])
        logits = heads.output_logits(of_heads[:, : text.shape[1] - ahead, i])
        sums.append(
            token_losses(
                logits,
                text[:, ahead:],
                teacher_logits=target_logits[:, ahead:] if distillation_weight else None,
                distillation_weight=distillation_weight,
                objective=objective,
            )
        )
    return jax.tree.map(lambda *parts: functools.reduce(operator.add, parts), *sums)


def _read(
    target: T5Model, inputs: Inputs
) -> tuple[Float[Array, "batch length embed"], Float32[Array, "batch length vocab"]]:
    """The target's states of a text, and its logits."""

    def read(network: Transformer):
        source, shifted, text = inputs
        encoded = network.encode(source)
        states = network.decode_states(encoded, source, shifted, text)
        return states, network.logits(states)

    return target.module.apply({"params": target.params}, method=read)
