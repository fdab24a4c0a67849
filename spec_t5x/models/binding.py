"""The networks by their configurations: what a ``T5Config`` or a ``GPTConfig`` is of."""

from spec_t5x.models import gpt, t5
from spec_t5x.models.gpt import GPTConfig, GPTModel
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import PyTree

ModelConfig = T5Config | GPTConfig
Model = T5Model | GPTModel


def bind(params: PyTree, config: ModelConfig) -> Model:
    """Parameters and their configuration as the loops' ``Target``."""
    return (GPTModel if isinstance(config, GPTConfig) else T5Model).create(params, config)


def abstract_variables(config: ModelConfig) -> PyTree:
    """Shapes of what the network initializes: ``params`` and ``params_axes``, float32.

    From the network's code alone: no weight is drawn and no memory taken.
    """
    network = gpt if isinstance(config, GPTConfig) else t5
    return network.abstract_variables(config)
