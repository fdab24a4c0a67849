"""Families of networks, and what a configuration determines: network, parameters, shapes."""

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
from spec_t5x.errors import InputError, check_choice
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.eagle import EagleConfig, EagleNetwork
from spec_t5x.models.t5 import NetworkConfig
from spec_t5x.models.weights import BITS, Form
from spec_t5x.names import AUTO, WEIGHTS
from spec_t5x.types import PyTree

ModelConfig = NetworkConfig
Model = CachedModel

# Matches configuration fields with numbers of layers, and the first layer in a parameter's path.
_LAYERS = re.compile("num_(.*_)?layers")
_FIRST_LAYER = re.compile(r"\blayers_0\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Family of networks with one class of configurations: an entry of the registry."""

    # Class of the configurations, which JSON and gin make.
    config: type[ModelConfig]
    # Class of the loops' ``Target``, made of parameters and a configuration.
    model: type[Model]
    # Configurations of published sizes, by name.
    sizes: Mapping[str, ModelConfig] = dataclasses.field(default_factory=dict)


def family_of(config: ModelConfig) -> Family:
    """Returns the registered family that a configuration belongs to, by its class."""
    families = registry.find_all("family").values()
    return next(family for family in families if isinstance(config, family.config))


def known_families() -> str:
    """Names the registered families, for messages: ``T5, T5Gemma or GPT``."""
    families = registry.find_all("family").values()
    *others, last = [family.config.__name__.removesuffix("Config") for family in families]
    return f"{', '.join(others)} or {last}" if others else last


def network_of(config: ModelConfig) -> nn.Module:
    """Returns the Flax module of a configuration.

    The module's inputs are tokens of the source, of the decoder's input and of its target;
    without a source, of the decoder's input alone.
    """
    return family_of(config).model.network(config)


def bind(params: PyTree, config: ModelConfig, weights: str = AUTO, kv: str = AUTO) -> Model:
    """Binds parameters to their configuration as the loops' ``Target``.

    Args:
      params: the network's parameters, or {}; ``InputError`` if they do not fit ``config``.
      config: the network's configuration.
      weights: "auto" keeps the parameters' precision, "int8" and "int4" round the matrices.
      kv: as in ``CachedModel.with_kv``.
    """
    check_choice("weights", weights, WEIGHTS)
    _check_shapes(params, config)
    model = family_of(config).model.create(params, config).with_kv(kv)
    return model if weights == AUTO else model.rounded(BITS[weights])


def _check_shapes(params: PyTree, config: ModelConfig) -> None:
    flat = flatten_dict(params, sep="/")
    expected = expected_shapes(config) if flat else {}
    forms = {path: leaf for path, leaf in flat.items() if isinstance(leaf, Form)}
    whole = jax.eval_shape(lambda forms: {path: f.unpacked() for path, f in forms.items()}, forms)
    for path in sorted(flat.keys() | expected.keys()):
        leaf, shape = whole.get(path, flat.get(path)), expected.get(path)
        found = getattr(getattr(leaf, "values", leaf), "shape", None)
        if found is None or found != shape:
            raise InputError(
                f"parameter {path} is {found or 'missing'} and the network's {shape or 'none'}: "
                "give the parameters and the configuration of one network"
            )


def abstract_variables(config: ModelConfig) -> PyTree:
    """Returns the network's variables, ``params`` and ``params_axes``, as float32 shapes.

    The shapes come from tracing the network's code, so no array is allocated.
    """
    return {name: unflatten_dict(flat, sep="/") for name, flat in _variables(config).items()}


def abstract_params(config: ModelConfig) -> PyTree:
    """Returns the ``params`` of ``abstract_variables``: nested dicts of shapes."""
    return abstract_variables(config)["params"]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns each parameter's shape by the parameter's path (``encoder/encoder_norm/scale``)."""
    return {path: leaf.shape for path, leaf in _variables(config)["params"].items()}


def _variables(config: ModelConfig) -> dict[str, dict[str, Any]]:
    """Returns ``abstract_variables`` by collection and path; ``config.dtype`` has no effect."""
    return _traced(dataclasses.replace(config, dtype="float32"))


@functools.lru_cache(maxsize=16)
def _traced(config: ModelConfig) -> dict[str, dict[str, Any]]:
    """Traces a network with one layer in each stack, since layers of a stack are alike."""
    names = [field.name for field in dataclasses.fields(config)]
    shallow = dataclasses.replace(config, **{n: 1 for n in names if _LAYERS.fullmatch(n)})
    is_head = isinstance(config, EagleConfig)
    network = EagleNetwork(shallow) if is_head else network_of(shallow)
    inputs = 1 if is_head or not config.has_source else 3

    def init(tokens):
        # Only shapes are computed, so the key has no effect.
        return network.init(jax.random.key(0), *[tokens] * inputs, enable_dropout=False)

    variables = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return {
        name: _every_layer(config, flatten_dict(tree, sep="/")) for name, tree in variables.items()
    }


def _every_layer(config: ModelConfig, flat: dict[str, Any]) -> dict[str, Any]:
    """Repeats the variables of each stack's first layer for all its layers, sorted by path."""
    repeated = {}
    for path, leaf in flat.items():
        stack = path.partition("/")[0]
        of_stack = f"num_{stack}_layers" if stack in ("encoder", "decoder") else "num_layers"
        copies = getattr(config, of_stack) if _FIRST_LAYER.search(path) else 1
        for layer in range(copies):
            repeated[_FIRST_LAYER.sub(f"layers_{layer}", path)] = leaf
    return dict(sorted(repeated.items(), key=lambda item: item[0].split("/")))
