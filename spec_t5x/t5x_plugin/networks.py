"""The package's configurations of T5X's example networks.

Parameter trees and logical axes are the same by construction, so that either network runs a T5X
checkpoint and T5X's partitioner shards both alike.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from spec_t5x.errors import InputError
from spec_t5x.models.decoder_only import DecoderOnlyConfig
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
# Fields that an encoder-decoder's configuration has in T5X and here.
ENCODER_DECODER_FIELDS = (*_COMMON, "num_encoder_layers", "num_decoder_layers")
# Attention logits: the package always computes them in float32, the more precise of the two.
_IGNORED = ("dtype", "scan_layers", "float32_attention_logits")
# Settings of T5X's networks for GPUs (``t5x.contrib.gpu.t5``), which must be off.
_OFF = ("scale_attn_logits",)


def t5_config(module: Any) -> T5Config:
    """Returns the configuration of an encoder-decoder of ``t5x.examples.t5.network``.

    Args:
      module: its Flax module, or another one whose ``config`` has the same names.

    Raises:
      InputError: scanned layers, or a config that lacks a size or has unknown settings.
    """
    return T5Config(**_sizes(module, ENCODER_DECODER_FIELDS))


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
    for name in _OFF:
        if (value := getattr(config, name, False)) is not False:
            raise InputError(
                f"config.{name} of {kind} is {value!r}, which no network here computes: "
                "speculate with a model that has it False"
            )
    known = {*names, *_IGNORED, *_OFF}
    unknown = [field.name for field in dataclasses.fields(config) if field.name not in known]
    if unknown:
        raise InputError(
            f"config.{unknown[0]} of {kind} is unknown: speculate with t5x.examples.t5.network, "
            "or decode the checkpoint (of scalable_t5, for example) with spec-t5x infer"
        )
    return {name: getattr(config, name) for name in names} | {"dtype": jnp.dtype(config.dtype).name}
