"""Conversion between configurations of T5X's example networks and the package's.

Parameter trees and logical axes are the same by construction, so that either network runs a T5X
checkpoint and T5X's partitioner shards both alike.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from t5x.examples.t5 import network

from spec_t5x.errors import InputError
from spec_t5x.models.decoder_only import DecoderOnlyConfig
from spec_t5x.models.sizes import size as config_of_size
from spec_t5x.models.t5 import T5Config

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
# Attention logits: the package always computes them in float32, the more precise of the two.
_IGNORED = ("dtype", "scan_layers", "float32_attention_logits")
# Fields of ``T5Config`` that are constants in T5X's network, with the values of the defaults.
_CONSTANTS = (
    "relpos_num_buckets",
    "relpos_max_distance",
    "relpos_per_layer",
    "layer_norm_epsilon",
)


def t5_config(module: Any) -> T5Config:
    """Returns the configuration of an encoder-decoder of ``t5x.examples.t5.network``.

    Args:
      module: its Flax module, or another one whose ``config`` has the same names.

    Raises:
      InputError: scanned layers, or a config that lacks a size or has unknown settings.
    """
    return T5Config(**_sizes(module, _OF_ENCODER_DECODERS))


def t5x_network(config: T5Config) -> network.Transformer:
    """Returns T5X's encoder-decoder (``t5x.examples.t5.network``) of this configuration.

    Raises:
      InputError: no configuration of a T5, or a value other than a constant of T5X's network.
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
    """Returns ``t5x_network`` of a size, a name of ``models.sizes``; gin calls this function."""
    config = config_of_size(size)
    return t5x_network(dataclasses.replace(config, dropout_rate=dropout_rate, dtype=dtype))


def decoder_only_config(module: Any) -> DecoderOnlyConfig:
    """Returns the configuration of ``t5x.examples.decoder_only.network``, as ``t5_config`` does."""
    return DecoderOnlyConfig(**_sizes(module, (*_COMMON, "num_layers")))


def _sizes(module: Any, names: tuple[str, ...]) -> dict[str, Any]:
    config, kind = getattr(module, "config", None), type(module).__name__
    if getattr(module, "scan_layers", False) or getattr(config, "scan_layers", False):
        raise InputError(
            f"module {kind} scans its layers: decode its checkpoint with spec-t5x infer, or "
            "speculate with a network that does not scan"
        )
    missing = [name for name in names if not hasattr(config, name)]
    if missing:
        raise InputError(
            f"module {kind} has no config.{missing[0]}: speculate with a network whose config has "
            "the names of T5X's examples"
        )
    known = {*names, *_IGNORED}
    unknown = [field.name for field in dataclasses.fields(config) if field.name not in known]
    if unknown:
        raise InputError(
            f"config.{unknown[0]} of {kind} is unknown: speculate with t5x.examples.t5.network, "
            "or decode the checkpoint (of scalable_t5, for example) with spec-t5x infer"
        )
    return {name: getattr(config, name) for name in names} | {"dtype": jnp.dtype(config.dtype).name}
