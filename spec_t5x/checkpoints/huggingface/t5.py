"""Hugging Face's T5 and mT5 directories, read and written without transformers.

config.json, weights (``model.safetensors`` or ``pytorch_model.bin``, whole or in shards) and
``spiece.model`` or ``tokenizer.json``, which ByT5 does without: T5 1.0, T5 1.1, Flan-T5, mT5 and
ByT5.
"""

from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.huggingface.weight_files import (
    check_tied,
    open_tensors,
    transposed,
    write_safetensors,
)
from spec_t5x.checkpoints.storage.files import (
    CONFIG_NAME,
    describing,
    read_json,
    write_json,
)
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensors import Report, Tensor, read_tensors
from spec_t5x.data.unigram import UnigramVocabulary
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
from spec_t5x.data.wordpiece import TOKENIZER_NAME
from spec_t5x.errors import InputError
from spec_t5x.models.binding import expected_shapes
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

# Our sizes: their names, and what transformers takes where config.json has none.
_SIZES = {
    "vocab_size": ("vocab_size", None),
    "emb_dim": ("d_model", None),
    "head_dim": ("d_kv", None),
    "mlp_dim": ("d_ff", None),
    "num_heads": ("num_heads", None),
    "num_encoder_layers": ("num_layers", None),
    # As many as the encoder has.
    "num_decoder_layers": ("num_decoder_layers", None),
    "dropout_rate": ("dropout_rate", 0.1),
    "relpos_num_buckets": ("relative_attention_num_buckets", 32),
    "relpos_max_distance": ("relative_attention_max_distance", 128),
    "layer_norm_epsilon": ("layer_norm_epsilon", 1e-6),
}

_TOKENIZER = "tokenizer_config.json"

# Rows of mT5's embedding, of every size.
_MT5_ROWS = 250112

_SPECIAL_IDS = {
    "decoder_start_token_id": PAD_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}

_SHARED = "shared.weight"
_LM_HEAD = "lm_head.weight"

# Our modules within a layer, as theirs: encoder layers hold two blocks, decoder
# layers three.
_IN_ENCODER = {
    "pre_attention_layer_norm": "layer.0.layer_norm",
    "attention": "layer.0.SelfAttention",
    "pre_mlp_layer_norm": "layer.1.layer_norm",
    "mlp": "layer.1.DenseReluDense",
}
_IN_DECODER = {
    "pre_self_attention_layer_norm": "layer.0.layer_norm",
    "self_attention": "layer.0.SelfAttention",
    "pre_cross_attention_layer_norm": "layer.1.layer_norm",
    "encoder_decoder_attention": "layer.1.EncDecAttention",
    "pre_mlp_layer_norm": "layer.2.layer_norm",
    "mlp": "layer.2.DenseReluDense",
}
_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "out": "o"}

# Copies of the embedding under other names.
_ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# A leftover of the original conversion that no release of transformers uses.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def open_model(directory: Path, values: dict[str, Any]) -> StoredModel:
    """Opens a model that transformers wrote; see ``loading.FORMATS``.

    Args:
        directory, values: the checkpoint and its config.json.
    """
    check_supported(values, directory)
    config = _read_config(values, directory / CONFIG_NAME)
    left = _settled(open_tensors(directory), config, values, directory)
    tensors = {}
    for path, (name, is_transposed) in tensor_names(config).items():
        if name in left:
            tensor = left.pop(name)
            tensors[path] = transposed(tensor) if is_transposed else tensor
    return StoredModel(
        # What belongs to no parameter is refused by its own name.
        tensors=tensors | left,
        config=config,
        vocabulary=read_vocabulary(directory, values),
        directory=directory,
        metadata={"model_type": values["model_type"]},
    )


def write_model(stage: Path, stored: StoredModel, dtype: str, report: Report | None) -> None:
    """Writes what ``T5ForConditionalGeneration.from_pretrained`` reads; see ``convert.WRITERS``.

    The model stays a ``t5`` or ``mt5`` if it was one; otherwise its sizes decide. Its further
    entries are left out: transformers owns config.json.
    """
    write_json(stage / CONFIG_NAME, config_values(stored.config, dtype, _model_type(stored)))
    write_json(stage / "generation_config.json", _SPECIAL_IDS)
    write_json(stage / _TOKENIZER, tokenizer_values(stored.known_vocabulary()))
    names = tensor_names(stored.config)
    tensors = (
        (names[path][0], tensor.T if names[path][1] else tensor)
        for path, tensor in read_tensors(stored.tensors, str(stored.directory), dtype, report)
    )
    write_safetensors(stage, tensors)


def tensor_names(config: T5Config) -> dict[str, tuple[str, bool]]:
    """Their name of each of our parameters, and whether it is stored transposed.

    Linear maps are stored there as ``[outputs, inputs]`` and relative biases as
    ``[buckets, heads]``: both are the transpose of T5X's. For example
    ``encoder/layers_0/attention/query/kernel`` is
    ``("encoder.block.0.layer.0.SelfAttention.q.weight", True)``.
    """
    return {path: _tensor_name(path) for path in expected_shapes(config)}


def _tensor_name(path: str) -> tuple[str, bool]:
    if path == "token_embedder/embedding":
        return _SHARED, False
    if path == "decoder/logits_dense/kernel":
        return _LM_HEAD, True
    stack, module, *inner = path.split("/")
    if module == "relpos_bias":
        bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return f"{stack}.{bias}", True
    if module == f"{stack}_norm":
        return f"{stack}.final_layer_norm.weight", False
    index = module.removeprefix("layers_")
    block = (_IN_ENCODER if stack == "encoder" else _IN_DECODER)[inner[0]]
    prefix = f"{stack}.block.{index}.{block}"
    if inner[-1] == "scale":
        return f"{prefix}.weight", False
    return f"{prefix}.{_PROJECTIONS.get(inner[1], inner[1])}.weight", True


def _settled(
    tensors: dict[str, Tensor], config: T5Config, values: dict[str, Any], directory: Path
) -> dict[str, Tensor]:
    """The tensors without those that say nothing new, after a look at what they hold."""
    tensors.pop(_UNUSED, None)
    # Old checkpoints hold the embedding three times.
    for alias in _ALIASES:
        if alias in tensors:
            tensors.setdefault(_SHARED, tensors.pop(alias))
    # Absent when the checkpoint is incomplete, which the check of names reports.
    if _SHARED in tensors:
        embedding = tensors[_SHARED]
        if config.logits_via_embedding:
            check_tied(tensors.pop(_LM_HEAD, None), embedding, directory)
        elif values.get("tie_word_embeddings"):
            # Tied but not rescaled, which T5X does not know: two layers of equal weights.
            tensors.setdefault(_LM_HEAD, embedding)
    return tensors


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
    generation = _read_if_there(directory / "generation_config.json")
    for name, needed in _SPECIAL_IDS.items():
        found = values.get(name, generation.get(name))
        if found not in (None, needed, [needed]):
            raise InputError(
                f"{path} has {name} {found}, T5 decodes with {needed}: give a "
                "checkpoint with T5's special ids"
            )


def _read_config(values: dict[str, Any], path: Path) -> T5Config:
    # Values that transformers leaves out, or writes as null, at their defaults.
    present = {name: value for name, value in values.items() if value is not None}
    projection = present.get("feed_forward_proj", "relu")
    if projection not in _ACTIVATIONS:
        raise InputError(
            f"{path} has feed_forward_proj {projection!r}: supported are {', '.join(_ACTIVATIONS)}"
        )
    with describing(path, "T5"):
        present.setdefault("num_decoder_layers", present["num_layers"])
        sizes = {
            ours: present[theirs] if default is None else present.get(theirs, default)
            for ours, (theirs, default) in _SIZES.items()
        }
        return T5Config(
            **sizes,
            mlp_activations=_ACTIVATIONS[projection],
            logits_via_embedding=_rescales_logits(values),
        )


def _model_type(stored: StoredModel) -> str:
    """ "t5" or "mt5": as config.json had it, or by the number of ids.

    ByT5 is a "t5" there. The two names differ in what transformers takes for granted, not
    in the network.
    """
    by_size = "mt5" if stored.config.vocab_size == _MT5_ROWS else "t5"
    return stored.metadata.get("model_type") or by_size


def config_values(config: T5Config, dtype: str, kind: str) -> dict[str, Any]:
    """config.json for transformers, of version 4 and 5."""
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
        **{theirs: getattr(config, ours) for ours, (theirs, _) in _SIZES.items()},
        "feed_forward_proj": projections[config.mlp_activations],
        # Decides in every version whether the logits are rescaled, too.
        "tie_word_embeddings": config.logits_via_embedding,
        "torch_dtype": dtype,
        **_SPECIAL_IDS,
    }


def _rescales_logits(values: dict[str, Any]) -> bool:
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


def read_vocabulary(directory: Path, values: dict[str, Any]) -> Vocabulary | None:
    """The vocabulary of a checkpoint whose config.json holds ``values``; None without files."""
    tokenizer, spiece = _read_if_there(directory / _TOKENIZER), directory / SPIECE_NAME
    extra_ids = tokenizer.get("extra_ids")
    if str(tokenizer.get("tokenizer_class", "")).startswith("ByT5"):
        vocabulary = ByteVocabulary(125 if extra_ids is None else extra_ids)
    elif spiece.is_file():
        # mT5's file holds its sentinels already, T5's does not.
        default = 0 if values["model_type"] == "mt5" else 100
        vocabulary = SentencePieceVocabulary(spiece, default if extra_ids is None else extra_ids)
    elif (directory / TOKENIZER_NAME).is_file():
        vocabulary = UnigramVocabulary(directory / TOKENIZER_NAME)
    elif values.get("vocab_size") == ByteVocabulary().vocab_size:
        vocabulary = ByteVocabulary()
    else:
        return None
    _check_added_tokens(tokenizer, vocabulary, directory)
    return vocabulary


def tokenizer_values(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer_config.json for transformers."""
    is_bytes = isinstance(vocabulary, ByteVocabulary)
    return {
        "tokenizer_class": "ByT5Tokenizer" if is_bytes else "T5Tokenizer",
        "extra_ids": vocabulary.extra_ids,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _check_added_tokens(tokenizer: dict[str, Any], vocabulary: Vocabulary, directory: Path) -> None:
    """Refuses tokens that exist in the tokenizer alone: their text would be lost."""
    decoder = tokenizer.get("added_tokens_decoder") or {}
    others = _read_if_there(directory / "added_tokens.json")
    with describing(f"tokenizer of {directory}", "added tokens"):
        added = {int(i): token.get("content") for i, token in decoder.items()}
        added |= {int(i): token for token, i in others.items()}
    foreign = sorted(i for i in added if i >= vocabulary.vocab_size)
    if foreign:
        raise InputError(
            f"{directory} adds token {added[foreign[0]]!r} with id {foreign[0]} to "
            f"the {vocabulary.vocab_size} of its vocabulary: give a model without "
            "added tokens"
        )
