"""Hugging Face's config.json of a T5, read and written."""

from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.own.formats import check_stored_dtype
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, one_line, read_json
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import EOS_ID, PAD_ID

# Their names for activations. "gelu_new" and the gated "gelu" are the tanh
# approximation, which T5X calls "gelu"; the exact, ungated "gelu" has no equal there.
_ACTIVATIONS = {
    "relu": ("relu",),
    "gated-gelu": ("gelu", "linear"),
    "gated-relu": ("relu", "linear"),
    "gated-silu": ("silu", "linear"),
    "silu": ("silu",),
    "gelu_new": ("gelu",),
}

# Rows of mT5's embedding, of every size.
_MT5_ROWS = 250112


def check_supported(values: dict[str, Any], directory: Path) -> None:
    """Refuses models that would load and then decode something else."""
    path, model_type = directory / CONFIG_NAME, values.get("model_type")
    if model_type == "umt5":
        raise InputError(f"{path} is a umt5, with a relative bias in every layer: give a t5 or mt5")
    if model_type not in ("t5", "mt5"):
        raise InputError(f"{path} has model_type {model_type!r}: give a t5 or mt5")
    if values.get("is_encoder_decoder", True) is False:
        raise InputError(f"{path} is an encoder alone: give an encoder-decoder T5")
    if "quantization_config" in values:
        raise InputError(f"{path} is quantized: give float32, float16 or bfloat16 weights")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    for name, needed in special_ids().items():
        found = values.get(name, generation.get(name))
        if found not in (None, needed, [needed]):
            raise InputError(
                f"{path} has {name} {found}, T5 decodes with {needed}: give a "
                "checkpoint with T5's special ids"
            )


def special_ids() -> dict[str, int]:
    return {
        "decoder_start_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }


def read_config(values: dict[str, Any], path: Path) -> T5Config:
    """Our configuration; ``settle_output_layer`` has the last word on the logits."""
    # Values that transformers leaves out, or writes as null, at their defaults.
    present = {name: value for name, value in values.items() if value is not None}
    projection = present.get("feed_forward_proj", "relu")
    if projection not in _ACTIVATIONS:
        raise InputError(
            f"{path} has feed_forward_proj {projection!r}: supported are {', '.join(_ACTIVATIONS)}"
        )
    try:
        return T5Config(
            vocab_size=present["vocab_size"],
            emb_dim=present["d_model"],
            num_heads=present["num_heads"],
            head_dim=present["d_kv"],
            mlp_dim=present["d_ff"],
            num_encoder_layers=present["num_layers"],
            num_decoder_layers=present.get("num_decoder_layers", present["num_layers"]),
            mlp_activations=_ACTIVATIONS[projection],
            dropout_rate=present.get("dropout_rate", 0.1),
            relpos_num_buckets=present.get("relative_attention_num_buckets", 32),
            relpos_max_distance=present.get("relative_attention_max_distance", 128),
            layer_norm_epsilon=present.get("layer_norm_epsilon", 1e-6),
        )
    except KeyError as error:
        raise InputError(f"{path} has no {error.args[0]}: copy the file again") from error
    except (InputError, TypeError) as error:
        raise InputError(
            f"{path} describes no T5 ({one_line(error)}): copy the file again"
        ) from error


def model_type(config: T5Config, metadata: dict[str, Any]) -> str:
    """ "t5" or "mt5": what ``metadata`` says, or what the number of ids does.

    ByT5 is a "t5" there. The two names differ in what transformers takes for granted, not
    in the network.
    """
    return metadata.get("model_type") or ("mt5" if config.vocab_size == _MT5_ROWS else "t5")


def config_values(config: T5Config, dtype: str, kind: str) -> dict[str, Any]:
    """config.json for transformers, of version 4 and 5.

    Raises:
        InputError: a dtype or an activation that is not among T5's there.
    """
    check_stored_dtype(dtype)
    projections = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    if config.mlp_activations not in projections:
        raise InputError(
            f"transformers has no T5 with activations {config.mlp_activations}: "
            f"it has {', '.join(map(str, projections))}"
        )
    return {
        "architectures": [f"{kind.upper()}ForConditionalGeneration"],
        "model_type": kind,
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.emb_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "num_heads": config.num_heads,
        "feed_forward_proj": projections[config.mlp_activations],
        "dropout_rate": config.dropout_rate,
        "relative_attention_num_buckets": config.relpos_num_buckets,
        "relative_attention_max_distance": config.relpos_max_distance,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        # Decides in every version whether the logits are rescaled, too.
        "tie_word_embeddings": config.logits_via_embedding,
        "torch_dtype": dtype,
        **special_ids(),
    }


def rescales_logits(values: dict[str, Any]) -> bool:
    """Whether transformers multiplies the last states by ``d_model ** -0.5``.

    Up to version 4 tying implies rescaling. Version 5 writes
    ``tie_word_embeddings: true`` for every model: T5 then has a separate
    ``scale_decoder_outputs``, and mT5 never rescales.
    """
    is_mt5 = values["model_type"] == "mt5"
    major = str(values.get("transformers_version", "")).partition(".")[0]
    if is_mt5 and major.isdigit() and int(major) >= 5:
        return False
    tied = values.get("tie_word_embeddings", not is_mt5) is not False
    return tied if is_mt5 else values.get("scale_decoder_outputs", tied) is not False
