"""The networks that T5X's examples declare, as the package's own, and the way back.

Parameter trees and logical axes are the same by construction, so that a T5X checkpoint
is run by either network and T5X's partitioner shards both alike.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from t5x.examples.t5 import network

from spec_t5x.errors import InputError
from spec_t5x.models.decoder_only import DecoderOnlyConfig
from spec_t5x.models.sizes import size as config_of_size
from spec_t5x.models.t5 import T5Config

# Attention logits are in float32 here, whatever it says: the more precise of the two.
_WITHOUT_EFFECT = ("float32_attention_logits",)
_COMMON = (
    "vocab_size",
    "emb_dim",
    "num_heads",
    "head_dim",
    "mlp_dim",
    "mlp_activations",
    "logits_via_embedding",
    "dropout_rate",
)
_OF_ENCODER_DECODERS = (*_COMMON, "num_encoder_layers", "num_decoder_layers")
# Constants of T5X's network, and the defaults of ``T5Config``.
_CONSTANTS = (
    "relpos_num_buckets",
    "relpos_max_distance",
    "relpos_per_layer",
    "layer_norm_epsilon",
)


def t5_config(module: Any) -> T5Config:
    """The sizes of an encoder-decoder of T5X, such as ``t5x.examples.t5.network``.

    Args:
      module: a Flax module with a ``config`` that names them as T5X's examples do.

    Raises:
      InputError: layers that are scanned, or a config that lacks a size or has settings that
        are not known.
    """
    return T5Config(**_sizes(module, _OF_ENCODER_DECODERS))


def t5x_network(config: T5Config) -> network.Transformer:
    """T5X's own encoder-decoder (``t5x.examples.t5.network``) of these sizes.

    Raises:
      InputError: a setting that is a constant in T5X.
    """
    if not isinstance(config, T5Config):
        kind = type(config).__name__.removesuffix("Config")
        raise InputError(f"T5X has no network of a {kind}: use spec-t5x, or give a size of T5")
    for name in _CONSTANTS:
        value, constant = getattr(config, name), getattr(T5Config, name)
        if value != constant:
            raise InputError(
                f"{name} is {value} and T5X's network has {constant}: use spec-t5x, whose "
                "networks have it as a setting"
            )
    sizes = {name: getattr(config, name) for name in _OF_ENCODER_DECODERS}
    return network.Transformer(network.T5Config(**sizes, dtype=config.dtype))


def t5x_network_of_size(
    size: str, *, dropout_rate: float, dtype: str = "bfloat16"
) -> network.Transformer:
    """The same of a name of ``models.sizes``, for gin."""
    config = dataclasses.replace(config_of_size(size), dropout_rate=dropout_rate, dtype=dtype)
    return t5x_network(config)


def decoder_only_config(module: Any) -> DecoderOnlyConfig:
    """The sizes of a decoder of T5X, such as ``t5x.examples.decoder_only.network``."""
    return DecoderOnlyConfig(**_sizes(module, (*_COMMON, "num_layers")))


def _sizes(module: Any, names: tuple[str, ...]) -> dict[str, Any]:
    config = getattr(module, "config", None)
    if getattr(module, "scan_layers", False) or getattr(config, "scan_layers", False):
        raise InputError(
            f"module {type(module).__name__} scans its layers: speculate with a network that "
            "does not (its checkpoint converts with spec-t5x convert)"
        )
    missing = [name for name in names if not hasattr(config, name)]
    if missing:
        raise InputError(
            f"module {type(module).__name__} has no config.{missing[0]}: speculate with a "
            "network whose config has the names of T5X's examples"
        )
    known = {*names, "dtype", "scan_layers", *_WITHOUT_EFFECT}
    unknown = [field.name for field in dataclasses.fields(config) if field.name not in known]
    if unknown:
        raise InputError(
            f"config.{unknown[0]} of {type(module).__name__} is unknown: speculate with a network "
            "of T5X's examples, or one that computes what they do"
        )
    return {name: getattr(config, name) for name in names} | {"dtype": jnp.dtype(config.dtype).name}
