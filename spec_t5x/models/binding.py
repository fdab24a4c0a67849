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
from spec_t5x.errors import InputError, check_choice, either
from spec_t5x.models.cached_model import CachedModel
from spec_t5x.models.eagle import EagleConfig, EagleNetwork
from spec_t5x.models.t5 import NetworkConfig
from spec_t5x.models.weights import BITS, Form
from spec_t5x.names import AUTO, WEIGHTS
from spec_t5x.types import PyTree

# Matches configuration fields with numbers of layers, and the first layer in a parameter's path.
_LAYERS = re.compile("num_(.*_)?layers")
_FIRST_LAYER = re.compile(r"\blayers_0\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Family of networks with one class of configurations: an entry of the registry."""

    # Class of the configurations, which JSON and gin make.
    config: type[NetworkConfig]
    # Class of the loops' ``Target``, made of parameters and a configuration.
    model: type[CachedModel]
    # Configurations of published sizes, by name.
    sizes: Mapping[str, NetworkConfig] = dataclasses.field(default_factory=dict)


def family_of(config: NetworkConfig) -> Family:
    """Returns the family of a configuration's class; those registered last have precedence."""
    for family in reversed(registry.find_all("family").values()):
        if isinstance(config, family.config):
            return family
    raise InputError(f"config is a {type(config).__name__}: give one of {known_families()}")


def known_families() -> str:
    """Names the registered families, for messages: ``T5, T5Gemma or GPT``."""
    families = registry.find_all("family").values()
    return either([family.config.__name__.removesuffix("Config") for family in families])


def network_of(config: NetworkConfig) -> nn.Module:
    """Returns the Flax module of a configuration.

    The module's inputs are tokens of the source, of the decoder's input and of its target;
    without a source, of the decoder's input alone.
    """
    return family_of(config).model.network(config)


def bind(params: PyTree, config: NetworkConfig, weights: str = AUTO, kv: str = AUTO) -> CachedModel:
    """Binds parameters, or {}, to their configuration as the loops' ``Target``.

    ``weights`` "auto" keeps their precision, "int8" and "int4" round the matrices; ``kv`` is as in
    ``CachedModel.with_kv``. Raises ``InputError`` if the parameters do not fit the configuration.
    """
    check_choice("weights", weights, WEIGHTS)
    model = family_of(config).model.create(_checked(params, config), config).with_kv(kv)
    return model if weights == AUTO else model.rounded(BITS[weights])


def _checked(params: PyTree, config: NetworkConfig) -> PyTree:
    """Returns parameters as nested dicts; raises ``InputError`` if they do not fit ``config``."""
    if not isinstance(params, Mapping):
        raise InputError(f"params are a {type(params).__name__}: give Flax's nested dicts")
    flat = {"/".join(map(str, path)): leaf for path, leaf in flatten_dict(params).items()}
    expected = expected_shapes(config) if flat else {}
    for path in sorted(flat.keys() | expected.keys()):
        leaf, shape = flat.get(path), expected.get(path)
        whole = jax.eval_shape(type(leaf).unpacked, leaf) if isinstance(leaf, Form) else leaf
        kind = "missing" if leaf is None else f"a {type(leaf).__name__}"
        found = getattr(getattr(whole, "values", whole), "shape", kind)
        if found != shape:
            raise InputError(
                f"parameter {path} is {found} and the network's {shape or 'none'}: "
                "give the parameters and the configuration of one network"
            )
    # Paths may have been keys.
    return unflatten_dict(flat, sep="/")


def abstract_variables(config: NetworkConfig) -> PyTree:
    """Returns the network's variables, ``params`` and ``params_axes``, as float32 shapes.

    The shapes come from tracing the network's code, so no array is allocated.
    """
    return {name: unflatten_dict(flat, sep="/") for name, flat in _variables(config).items()}


def abstract_params(config: NetworkConfig) -> PyTree:
    """Returns the ``params`` of ``abstract_variables``: nested dicts of shapes."""
    return abstract_variables(config)["params"]


def expected_shapes(config: NetworkConfig) -> dict[str, tuple[int, ...]]:
    """Returns each parameter's shape by the parameter's path (``encoder/encoder_norm/scale``)."""
    return {path: leaf.shape for path, leaf in _variables(config)["params"].items()}


@functools.lru_cache(maxsize=16)
def _variables(config: NetworkConfig) -> dict[str, dict[str, Any]]:
    """Returns ``abstract_variables`` by collection and path; ``config.dtype`` has no effect."""
    # Layers of a stack are alike.
    one = {name: 1 for name in vars(config) if _LAYERS.fullmatch(name)}
    shallow = dataclasses.replace(config, dtype="float32", **one)
    is_head = isinstance(config, EagleConfig)
    network = EagleNetwork(shallow) if is_head else network_of(shallow)
    inputs = 1 if is_head or not config.has_source else 3

    def init(tokens):
        # Only shapes are computed, so the key has no effect.
        return network.init(jax.random.key(0), *[tokens] * inputs, enable_dropout=False)

    variables = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 1), jnp.int32)).items()
    return {name: _every_layer(config, flatten_dict(tree, sep="/")) for name, tree in variables}


def _every_layer(config: NetworkConfig, flat: dict[str, Any]) -> dict[str, Any]:
    """Repeats the variables of each stack's first layer for all its layers, sorted by path."""
    repeated = {}
    for path, leaf in flat.items():
        stack = path.partition("/")[0]
        of_stack = f"num_{stack}_layers" if stack in ("encoder", "decoder") else "num_layers"
        copies = getattr(config, of_stack) if _FIRST_LAYER.search(path) else 1
        for layer in range(copies):
            repeated[_FIRST_LAYER.sub(f"layers_{layer}", path)] = leaf
    return dict(sorted(repeated.items(), key=lambda item: item[0].split("/")))
