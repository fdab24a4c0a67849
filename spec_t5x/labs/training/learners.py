"""Learners of plain training: networks that learn a text, and heads that learn their target.

Head i learns the target's own distribution of the token that is i + 1 positions further: soft
labels, since speculative decoding accepts by the overlap of the two distributions. The target
reads each pair once, teacher-forced, for the states that the heads take and for the
distributions that they learn.
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from spec_t5x.labs.training.losses import LossSums, token_losses
from spec_t5x.labs.training.trainer import Inputs, Learner, TrainOptions
from spec_t5x.models.binding import ModelConfig, network_of
from spec_t5x.models.heads import Heads, HeadsConfig, T5Heads
from spec_t5x.models.partitioning import declared_shardings, param_shardings
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import Transformer
from spec_t5x.types import Array, Float, Float32, Key, PyTree


@dataclasses.dataclass(frozen=True)
class Network(Learner):
    """A network of any family that learns the tokens of texts."""

    config: ModelConfig
    options: TrainOptions

    target = None

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Random parameters."""
        tokens = jnp.zeros((1, 8), jnp.int32)
        inputs = _inputs_of(self.config, (tokens, tokens, tokens))
        return network_of(self.config).init(key, *inputs, enable_dropout=False)["params"]

    def shardings(self, mesh: Mesh) -> PyTree:
        """By the network's logical axes."""
        return param_shardings(self.config, mesh)

    def loss(
        self,
        params: PyTree,
        inputs: Inputs,
        key: Key[Array, ""] | None,
        target_params: PyTree | None = None,
    ) -> LossSums:
        """Cross-entropy, with label smoothing and z-loss."""
        return token_losses(
            network_logits(self.config, params, inputs, key),
            inputs[2],
            label_smoothing=self.options.label_smoothing,
            z_loss=self.options.z_loss,
        )


def network_logits(
    config: ModelConfig, params: PyTree, inputs: Inputs, dropout_key: Key[Array, ""] | None = None
) -> Float32[Array, "batch length vocab"]:
    """Logits of each token of a text, teacher-forced; without a key there is no dropout."""
    dropout = {"enable_dropout": dropout_key is not None}
    if dropout_key is not None:
        dropout["rngs"] = {"dropout": dropout_key}
    return network_of(config).apply({"params": params}, *_inputs_of(config, inputs), **dropout)


def _inputs_of(config: ModelConfig, inputs: Inputs) -> tuple:
    """What a network is called with: without a source, what is fed to the decoder alone."""
    return inputs if config.has_source else inputs[1:2]


@dataclasses.dataclass(frozen=True)
class HeadsLearner(Learner):
    """Draft heads of a target. Losses and accuracies are means over the heads."""

    config: HeadsConfig
    options: TrainOptions
    target: T5Model

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Heads that say what the target says one token too early."""
        return self._variables(key)["params"]

    def _variables(self, key: Key[Array, ""]) -> PyTree:
        state = jnp.zeros((1, 1, self.config.emb_dim))
        return Heads(self.config).init(key, state, state, self.config.num_heads)

    def shardings(self, mesh: Mesh) -> PyTree:
        """By the heads' logical axes."""
        shapes = jax.eval_shape(self._variables, jax.random.key(0))
        return declared_shardings(shapes["params"], shapes["params_axes"], mesh)

    def loss(
        self,
        params: PyTree,
        inputs: Inputs,
        key: Key[Array, ""] | None,
        target_params: PyTree,
    ) -> LossSums:
        """``heads_losses`` as the options say; the heads have no dropout."""
        target = self.target.with_params(target_params)
        return heads_losses(
            T5Heads.create(params, target),
            target,
            inputs,
            distillation_weight=self.options.distillation_weight * self.options.uses_target,
            objective=self.options.objective,
        )


def heads_losses(
    heads: T5Heads,
    target: T5Model,
    inputs: Inputs,
    *,
    distillation_weight: float = 0.0,
    objective: str = "forward_kl",
) -> LossSums:
    """Losses summed over heads and tokens; the settings are those of ``losses.token_losses``."""
    text = inputs[2]
    target_logits, _, states = read_target(target, inputs)
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
                target_logits=target_logits[:, ahead:] if distillation_weight else None,
                distillation_weight=distillation_weight,
                objective=objective,
            )
        )
    return jax.tree.map(lambda *parts: functools.reduce(operator.add, parts), *sums)


class TargetReading(NamedTuple):
    """What a target makes of a text."""

    logits: Float32[Array, "batch length vocab"]
    encoded: Float[Array, "batch source embed"] | None = None
    states: Float[Array, "batch length embed"] | None = None


def read_target(target: T5Model, inputs: Inputs) -> TargetReading:
    """The target over a text, teacher-forced."""

    def read(network: Transformer):
        source, shifted, text = inputs
        encoded = network.encode(source)
        states = network.decode_states(encoded, source, shifted, text)
        return TargetReading(network.logits(states), encoded, states)

    return target.module.apply({"params": target.params}, method=read)
