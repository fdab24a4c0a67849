"""Families of networks: what a ``T5Config``, or a configuration of another kind, is of."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x import registry
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.eagle import EagleConfig, EagleNetwork
from spec_t5x.models.t5 import NetworkConfig
from spec_t5x.models.weights import BITS
from spec_t5x.names import AUTO
from spec_t5x.types import PyTree

ModelConfig = NetworkConfig
Model = CachedModel

# Sizes that are numbers of layers, and the first layer in a path.
_LAYERS = re.compile("num_(.*_)?layers")
_FIRST_LAYER = re.compile(r"\blayers_0\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Networks of one kind, of any size: an entry of the registry."""

    # The sizes of one of them; JSON and gin make it.
    config: type[ModelConfig]
    # Binds parameters to a configuration as the loops' ``Target``; has the ``network``.
    model: type[Model]
    # Published sizes by name.
    sizes: Mapping[str, ModelConfig] = dataclasses.field(default_factory=dict)


def family_of(config: ModelConfig) -> Family:
    """The family that a configuration belongs to."""
    families = registry.find_all("family").values()
    return next(family for family in families if isinstance(config, family.config))


def known_families() -> str:
    """The families that are registered, for messages: ``T5, T5Gemma or GPT``."""
    families = registry.find_all("family").values()
    *others, last = [family.config.__name__.removesuffix("Config") for family in families]
    return f"{', '.join(others)} or {last}" if others else last


def network_of(config: ModelConfig) -> nn.Module:
    """The network without parameters.

    It is called with the tokens of sources, those fed to the decoder and those to predict, or with
    the second alone where there is no source.
    """
    return family_of(config).model.network(config)


def bind(params: PyTree, config: ModelConfig, weights: str = AUTO) -> Model:
    """Parameters and their configuration as the loops' ``Target``.

    Args:
      params: the tree of the network.
      config: which network.
      weights: "auto" takes them as they are, "int8" and "int4" round the matrices.
    """
    model = family_of(config).model.create(params, config)
    return model if weights == AUTO else model.rounded(BITS[weights])


def abstract_variables(config: ModelConfig) -> PyTree:
    """Shapes of what the network initializes: ``params`` and ``params_axes``, float32.

    From the network's code alone: no weight is drawn and no memory taken.
    """
    return {name: unflatten_dict(flat, sep="/") for name, flat in _variables(config).items()}


def abstract_params(config: ModelConfig) -> PyTree:
    """The ``params`` of ``abstract_variables``: nested dicts of ``jax.ShapeDtypeStruct``."""
    return abstract_variables(config)["params"]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its path, such as ``encoder/encoder_norm/scale``."""
    return {path: leaf.shape for path, leaf in _variables(config)["params"].items()}


def _variables(config: ModelConfig) -> dict[str, dict[str, Any]]:
    """``abstract_variables`` by collection and path."""
    # Whatever the layers compute in, the parameters are float32.
    return _traced(dataclasses.replace(config, dtype="float32"))


@functools.lru_cache(maxsize=16)
def _traced(config: ModelConfig) -> dict[str, dict[str, Any]]:
    """The variables of a network, found by tracing it.

    The layers of a stack are alike: a network with one layer in each is traced, in a
    fraction of the time that all of them would take.
    """
    names = [field.name for field in dataclasses.fields(config)]
    shallow = dataclasses.replace(config, **{n: 1 for n in names if _LAYERS.fullmatch(n)})
    is_head = isinstance(config, EagleConfig)
    network = EagleNetwork(shallow) if is_head else network_of(shallow)
    inputs = 1 if is_head or not config.has_source else 3

    def init(tokens):
        # No weight is drawn here, so the key is without effect.
        return network.init(jax.random.key(0), *[tokens] * inputs, enable_dropout=False)

    variables = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return {
        name: _every_layer(config, flatten_dict(tree, sep="/")) for name, tree in variables.items()
    }


def _every_layer(config: ModelConfig, flat: dict[str, Any]) -> dict[str, Any]:
    """What is in the first layer of a stack for each of its layers, in a tree's order."""
    repeated = {}
    for path, leaf in flat.items():
        stack = path.partition("/")[0]
        of_stack = f"num_{stack}_layers" if stack in ("encoder", "decoder") else "num_layers"
        copies = getattr(config, of_stack) if _FIRST_LAYER.search(path) else 1
        for layer in range(copies):
            repeated[_FIRST_LAYER.sub(f"layers_{layer}", path)] = leaf
    return dict(sorted(repeated.items(), key=lambda item: item[0].split("/")))
