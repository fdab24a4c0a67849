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
_IGNORED = ("dtype", "float32_attention_logits")
# A setting of T5X's network for GPUs, which must be off.
_OFF = ("scale_attn_logits", False)
# Modules whose ``Transformer``, or ``DecoderWrapper``, the package's network computes.
_T5 = ("t5x.examples.t5.network", "t5x.contrib.gpu.t5.network")
_DECODER_ONLY = ("t5x.examples.decoder_only.network",)


def t5_config(module: Any) -> T5Config:
    """Returns the configuration of the encoder-decoder of ``t5x.examples.t5.network``.

    ``module`` is its Flax module, that of ``t5x.contrib.gpu.t5``, or an instance of a subclass that
    computes what they do; raises ``InputError`` for other networks and settings.
    """
    return T5Config(**_sizes(module, ENCODER_DECODER_FIELDS, _T5))


def decoder_only_config(module: Any) -> DecoderOnlyConfig:
    """Returns the configuration of ``t5x.examples.decoder_only.network``, as ``t5_config`` does."""
    return DecoderOnlyConfig(**_sizes(module, (*_COMMON, "num_layers"), _DECODER_ONLY))


def _sizes(module: Any, names: tuple[str, ...], stock: tuple[str, ...]) -> dict[str, Any]:
    kind = type(module).__name__
    for method in ("setup", "encode", "decode", "__call__"):
        # The class that defines it: a wrapper's ``__module__`` may be the wrapped function's.
        of = next((base for base in type(module).__mro__ if method in vars(base)), None)
        if of is not None and of.__module__ not in stock:
            raise InputError(
                f"module {kind} has {method} of {of.__module__}, which is unknown here: speculate "
                f"with {' or '.join(stock)}, or leave speculate.gin out (spec-t5x infer decodes "
                "checkpoints of scalable_t5)"
            )
    config = module.config
    for name in (field.name for field in dataclasses.fields(config)):
        value = getattr(config, name)
        if name not in (*names, *_IGNORED) and (name, value) != _OFF:
            raise InputError(
                f"config.{name} of {kind} is {value!r}, which no network here computes: speculate "
                f"with a model that {stock[0]} computes"
            )
    return {name: getattr(config, name) for name in names} | {"dtype": jnp.dtype(config.dtype).name}
