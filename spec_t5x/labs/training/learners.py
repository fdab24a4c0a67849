"""The learner of plain training, and teacher-forced calls of networks over whole texts."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from spec_t5x.labs.training.interfaces import Inputs, Learner, TrainOptions
from spec_t5x.labs.training.losses import LossSums, token_losses
from spec_t5x.models.binding import network_of
from spec_t5x.models.partitioning import param_shardings
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import NetworkConfig, Transformer
from spec_t5x.types import Array, Float, Float32, Key, PyTree


@dataclasses.dataclass(frozen=True)
class Network(Learner):
    """The learner of a network of any family, trained by cross-entropy on the tokens of texts."""

    config: NetworkConfig
    options: TrainOptions

    target = None

    def init(self, key: Key[Array, ""]) -> PyTree:
        """Returns random parameters of the network."""
        inputs = _inputs_of(self.config, (jnp.zeros((1, 8), jnp.int32),) * 3)
        return network_of(self.config).init(key, *inputs, enable_dropout=False)["params"]

    def shardings(self, mesh: Mesh) -> PyTree:
        """Returns a ``NamedSharding`` for each parameter, by the network's logical axes."""
        return param_shardings(self.config, mesh)

    def loss(
        self,
        params: PyTree,
        inputs: Inputs,
        key: Key[Array, ""] | None,
        target_params: PyTree | None = None,
    ) -> LossSums:
        """Sums the cross-entropy, with label smoothing and z-loss; ignores ``target_params``."""
        return token_losses(
            network_logits(self.config, params, inputs, key),
            inputs[2],
            label_smoothing=self.options.label_smoothing,
            z_loss=self.options.z_loss,
        )


def network_logits(
    config: NetworkConfig, params: PyTree, inputs: Inputs, dropout_key: Key[Array, ""] | None = None
) -> Float32[Array, "batch length vocab"]:
    """Computes the logits that predict each token of a text, with dropout if a key is given."""
    dropout = {"enable_dropout": dropout_key is not None}
    if dropout_key is not None:
        dropout["rngs"] = {"dropout": dropout_key}
    return network_of(config).apply({"params": params}, *_inputs_of(config, inputs), **dropout)


def _inputs_of(config: NetworkConfig, inputs: Inputs) -> tuple:
    """Returns a network's arguments: all inputs, or if it has no source, the shifted text alone."""
    return inputs if config.has_source else inputs[1:2]


class TargetReading(NamedTuple):
    """A target's outputs over texts: logits, encoder outputs, states of the decoder.

    The states are the last layer's, and those of the layers that ``T5Model.showing`` adds.
    """

    logits: Float32[Array, "batch length vocab"]
    encoded: Float[Array, "batch source embed"] | None = None
    states: Float[Array, "batch length target_states"] | None = None


def read_target(target: T5Model, inputs: Inputs) -> TargetReading:
    """Runs the target over a batch of texts, teacher-forced; returns all three outputs."""

    def read(network: Transformer):
        source, shifted, text = inputs
        encoded = network.encode(source)
        states = network.decode_states(encoded, source, shifted, text)
        return TargetReading(network.logits(states), encoded, states)

    return target.module.apply({"params": target.params}, method=read)
