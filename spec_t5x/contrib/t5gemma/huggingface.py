"""Format of Hugging Face's T5Gemma and T5Gemma 2 directories; parts for images are not read.

config.json describes encoder and decoder separately. "Our" names are those of ``network``.
"""

import dataclasses
from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.formats import Format
from spec_t5x.checkpoints.huggingface import t5
from spec_t5x.checkpoints.huggingface.vocabulary_files import read_vocabulary
from spec_t5x.checkpoints.huggingface.weight_files import (
    check_shared,
    open_tensors,
    same_table,
    unwrapped,
)
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensors import Tensor
from spec_t5x.contrib.t5gemma.network import GLOBAL, LOCAL, T5GemmaConfig
from spec_t5x.data.mapped_vocabulary import their_ids
from spec_t5x.errors import InputError, check_numbers
from spec_t5x.models.binding import expected_shapes

_KINDS = ("t5gemma", "t5gemma2")

# Our sizes of a stack (encoder or decoder), and the names in config.json.
_SIZES = {
    "emb_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "query_scalar": "query_pre_attn_scalar",
}
# Settings that must be equal in both stacks, because the network has one value for both.
_OF_BOTH = (
    "vocab_size",
    "hidden_activation",
    "rms_norm_eps",
    "attention_bias",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
)
# transformers' defaults of entries that are absent in a stack.
_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}
_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_IMAGE_END_ID = 256_000
_LAYER_KINDS = {"sliding_attention": LOCAL, "full_attention": GLOBAL}
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "silu": "silu", "relu": "relu"}

# Our modules of a layer, and theirs; then the maps within a module.
_MODULES = {
    "pre_attention_layer_norm": "pre_self_attn_layernorm",
    "attention": "self_attn",
    "post_attention_layer_norm": "post_self_attn_layernorm",
    "pre_cross_attention_layer_norm": "pre_cross_attn_layernorm",
    "encoder_decoder_attention": "cross_attn",
    "post_cross_attention_layer_norm": "post_cross_attn_layernorm",
    "pre_mlp_layer_norm": "pre_feedforward_layernorm",
    "mlp": "mlp",
    "post_mlp_layer_norm": "post_feedforward_layernorm",
}
_MAPS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "wi_0": "gate_proj",
    "wi_1": "up_proj",
    "wo": "down_proj",
}

_EMBEDDING = "model.decoder.embed_tokens.weight"
_SOURCE_EMBEDDING = "model.encoder.embed_tokens.weight"
_IMAGE_END = "model.encoder.embed_tokens.eoi_embedding"
_LM_HEAD = "lm_head.out_proj.weight"
# Tensors with one row per token id.
_TABLES = (_EMBEDDING, _SOURCE_EMBEDDING, _LM_HEAD)
# T5Gemma 2's modules for images, and the decoder's copy of the embedding that ends one.
_OF_IMAGES = ("model.encoder.vision_tower.", "model.encoder.multi_modal_projector.")
_IMAGE_END_COPY = "model.decoder.embed_tokens.eoi_embedding"


def open_model(directory: Path, values: dict[str, Any], has_weights: bool = True) -> StoredModel:
    """Opens a directory whose config.json holds ``values``; see ``formats``."""
    ids = check_supported(values, directory)
    config = _read_config(values, directory / CONFIG_NAME)
    tensors = open_tensors(directory) if has_weights else {}
    # "model." is part of the names here.
    tensors = unwrapped(tensors, ("model", "lm_head"), directory)
    left, config = _settled(tensors, config, directory)
    num_ids = config.vocab_size
    left, config = t5.renumbered_model(left, config, ids, _TABLES)
    if config.image_end_id:
        theirs = their_ids(num_ids, ids[t5.START], ids[t5.EOS]).tolist()
        config = dataclasses.replace(config, image_end_id=theirs.index(config.image_end_id))
    return StoredModel(
        tensors=t5.by_our_paths(left, tensor_names(config)),
        config=config,
        vocabulary=read_vocabulary(
            directory,
            {"tokenizer_class": "GemmaTokenizer"} | values | {"vocab_size": num_ids},
            ids[t5.START],
            ids[t5.EOS_IDS],
        ),
        directory=directory,
        metadata={"model_type": values["model_type"], t5.PAD: ids[t5.PAD]},
    )


def check_supported(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Returns ``special_ids``; raises ``InputError`` for settings that are not supported."""
    path = directory / CONFIG_NAME
    t5.check_whole(values, path)
    encoder, decoder = _stacks(values, path)
    # T5Gemma 2's config.json has a softcap that its network does not use.
    softcaps = ("attn_logit_softcapping",) if values["model_type"] == "t5gemma" else ()
    for name in (*_OF_BOTH, *softcaps):
        if encoder.get(name) != decoder.get(name):
            raise InputError(
                f"{path} has {name} {encoder.get(name)!r} in its encoder and {decoder.get(name)!r} "
                "in its decoder: give a model with the same value in both"
            )
    for name in ("final_logit_softcapping", *softcaps):
        if decoder.get(name) == 0:
            raise InputError(f"{path} has {name} 0, by which transformers divides: set it to null")
    if (name := decoder.get("hidden_activation")) not in tuple(_ACTIVATIONS):
        raise InputError(
            f"{path} has hidden_activation {name!r}: supported are {', '.join(_ACTIVATIONS)}"
        )
    if decoder.get("attention_bias"):
        raise InputError(f"{path} has attention_bias, which is not supported: give one without it")
    if not (is_causal := values["decoder"].get("is_causal", True)):
        raise InputError(f"{path} has is_causal {is_causal!r}: give a T5Gemma without it")
    for rope in _ropes(decoder, values["model_type"]).values():
        if (kind := _rope_type(rope)) not in ("default", "linear"):
            raise InputError(
                f"{path} has rope_type {kind!r}: only 'default' and 'linear' are supported"
            )
    return special_ids(values, directory)


def special_ids(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the start, end and padding ids in config.json's numbering; see ``t5``."""
    _, decoder = _stacks(values, directory / CONFIG_NAME)
    return t5.special_ids(values | {"vocab_size": decoder.get("vocab_size")}, directory)


def _stacks(values: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns encoder's and decoder's settings, with some defaults and without null entries."""
    with describing(path, "T5Gemma"):
        encoder, decoder = values["encoder"], values["decoder"]
        encoder = encoder.get("text_config", encoder)
        usual = _DEFAULTS | (_SOFTCAPS if values["model_type"] == "t5gemma" else {})
        return tuple(
            {name: value for name, value in (usual | stack).items() if value is not None}
            for stack in (encoder, decoder)
        )


def _ropes(stack: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Returns rotary settings by kind of layer, from names of transformers 5 or of version 4."""
    ropes, scaling = stack.get("rope_parameters", {}), stack.get("rope_scaling", {})
    base = {"rope_theta": stack.get("rope_theta", 1e6 if kind == "t5gemma2" else 1e4)}
    if kind != "t5gemma2":
        return dict.fromkeys((LOCAL, GLOBAL), base | (scaling or ropes))
    local = {"rope_theta": stack.get("rope_local_base_freq", 1e4)}
    return {
        LOCAL: local | (ropes.get("sliding_attention") or {}),
        GLOBAL: base | (ropes.get("full_attention") or {}) | scaling,
    }


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _layer_kinds(stack: dict[str, Any], kind: str) -> tuple[str, ...]:
    if "layer_types" in stack:
        return tuple(_LAYER_KINDS[name] for name in stack["layer_types"])
    every = stack.get("sliding_window_pattern", 6) if kind == "t5gemma2" else 2
    layers = range(1, stack["num_hidden_layers"] + 1)
    return tuple(LOCAL if layer % every else GLOBAL for layer in layers)


def _read_config(values: dict[str, Any], path: Path) -> T5GemmaConfig:
    encoder, decoder = _stacks(values, path)
    kind = values["model_type"]
    is_second = kind == "t5gemma2"
    names = _SIZES | {f"encoder_{ours}": f"encoder.{theirs}" for ours, theirs in _SIZES.items()}
    names |= {"num_encoder_layers": "encoder.num_hidden_layers", "window": "sliding_window"}
    names |= {"num_decoder_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}
    with describing(path, "T5Gemma", names):
        sizes = {ours: decoder[theirs] for ours, theirs in _SIZES.items()}
        of_encoder = {f"encoder_{ours}": encoder[theirs] for ours, theirs in _SIZES.items()}
        ropes = {
            f"{name}_rotary": (
                float(rope["rope_theta"]),
                float(rope["factor"]) if _rope_type(rope) == "linear" else 1.0,
            )
            for name, rope in _ropes(decoder, kind).items()
        }
        window, image_end = encoder["sliding_window"], -1
        # T5Gemma 2's encoder attends to nothing in a window of 0.
        check_numbers(int(is_second), sliding_window=window)
        if is_second:
            # transformers takes the first that is given.
            given = map(values["encoder"].get, ("eoi_token_id", "eoi_token_index"))
            image_end = next((each for each in given if each is not None), _IMAGE_END_ID)
        if image_end == 0:
            raise InputError("the id that ends images is 0, which means none here: give another")
        return T5GemmaConfig(
            **sizes,
            **of_encoder,
            **ropes,
            vocab_size=decoder["vocab_size"],
            num_encoder_layers=encoder["num_hidden_layers"],
            num_decoder_layers=decoder["num_hidden_layers"],
            layer_kinds=_layer_kinds(decoder, kind),
            encoder_layer_kinds=_layer_kinds(encoder, kind),
            window=decoder["sliding_window"],
            # (before, after) of a position, as in transformers.
            encoder_reach=((window - 1) // 2, window // 2) if is_second else (window, window),
            # T5Gemma 2's config.json has a softcap that its network does not use.
            attention_softcap=0.0 if is_second else decoder.get("attn_logit_softcapping", 0.0),
            logits_softcap=decoder.get("final_logit_softcapping", 0.0),
            has_head_norms=is_second,
            merges_source=is_second,
            has_source_embedder=not is_second,
            image_end_id=image_end if 0 < image_end < decoder["vocab_size"] else 0,
            mlp_activations=(_ACTIVATIONS[decoder["hidden_activation"]], "linear"),
            logits_via_embedding=values.get("tie_word_embeddings", True),
            dropout_rate=float(values.get("dropout_rate", 0.0)),
            layer_norm_epsilon=decoder["rms_norm_eps"],
        )


def _settled(
    tensors: dict[str, Tensor], config: T5GemmaConfig, directory: Path
) -> tuple[dict[str, Tensor], T5GemmaConfig]:
    """Returns text tensors without duplicates, and ``config``, untied if the output layer is.

    As in transformers, a stored output layer that differs from the embedding overrides a tie.
    """
    left = {
        name.replace("encoder.text_model.", "encoder."): tensor
        for name, tensor in tensors.items()
        if not name.startswith(_OF_IMAGES)
    }
    if not config.has_source_embedder:
        if _SOURCE_EMBEDDING in left:
            source = left[_SOURCE_EMBEDDING]
            check_shared(left.pop(_EMBEDDING, source), source, directory)
        left.pop(_IMAGE_END_COPY, None)
        if not config.image_end_id:
            left.pop(_IMAGE_END, None)
    table = _EMBEDDING if config.has_source_embedder else _SOURCE_EMBEDDING
    if config.logits_via_embedding and table in left:
        if same_table(left.get(_LM_HEAD, left[table]), left[table]):
            left.pop(_LM_HEAD, None)
        else:
            config = dataclasses.replace(config, logits_via_embedding=False)
    return left, config


def tensor_names(config: T5GemmaConfig) -> dict[str, tuple[str, bool]]:
    """Returns, by our path, the tensor's name in the file, and True if it is stored transposed."""
    shared = _EMBEDDING if config.has_source_embedder else _SOURCE_EMBEDDING
    others = {
        "token_embedder/embedding": (shared, False),
        "token_embedder/image_end": (_IMAGE_END, False),
        "source_embedder/embedding": (_SOURCE_EMBEDDING, False),
        "decoder/logits_dense/kernel": (_LM_HEAD, True),
        "encoder/encoder_norm/scale": ("model.encoder.norm.weight", False),
        "decoder/decoder_norm/scale": ("model.decoder.norm.weight", False),
    }
    return {path: others.get(path) or _of_layer(path) for path in expected_shapes(config)}


def _of_layer(path: str) -> tuple[str, bool]:
    stack, layer, module, *inner = path.split("/")
    number, module = layer.removeprefix("layers_"), module.replace("self_attention", "attention")
    names = [_MODULES[module], *(_MAPS[name] for name in inner[:-1])]
    return f"model.{stack}.layers.{number}.{'.'.join(names)}.weight", inner[-1] == "kernel"


FORMAT = Format(
    recognizes=lambda directory, values: bool(values) and values.get("model_type") in _KINDS,
    open_model=open_model,
    config=T5GemmaConfig,
    check_supported=check_supported,
)
