"""Format of Hugging Face's GPT-2 directories, which are read without transformers.

"Their" ids are the directory's; "ours" (``data.mapped_vocabulary``) number the embedding's rows.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spec_t5x.checkpoints.formats import Format
from spec_t5x.checkpoints.huggingface import generation_config, vocabulary_files
from spec_t5x.checkpoints.huggingface.t5 import entries
from spec_t5x.checkpoints.huggingface.vocabulary_files import (
    ADDED_NAME,
    SETTINGS_NAME,
    UNCHANGED,
    class_of,
    tokenizer_folder,
)
from spec_t5x.checkpoints.huggingface.weight_files import (
    check_weights,
    open_tensors,
    renumbered,
    same_table,
    transposed,
    unwrapped,
)
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing, read_if_there
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensors import Tensor
from spec_t5x.contrib.lm.gpt import GPTConfig
from spec_t5x.data.mapped_vocabulary import (
    MERGES_NAME,
    VOCAB_NAME,
    MappedVocabulary,
    read_tokenizer,
    reading_tokenizer,
    their_ids,
)
from spec_t5x.errors import InputError

# Two names for the tanh approximation, which Flax calls gelu.
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
_TOKENIZER = "GPT2Tokenizer"
# Other names that transformers reads for entries.
_ALIASES = {
    **{"hidden_size": "n_embd", "num_hidden_layers": "n_layer"},
    **{"num_attention_heads": "n_head", "max_position_embeddings": "n_positions"},
}
# Settings that change the network, with the only supported values, those of GPT-2.
_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}

_PREFIX = "transformer."
_HEAD = "lm_head.weight"
_EMBEDDING = "wte.weight"
# Causal masks, which old releases of transformers stored with the weights.
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")

_TOP = {
    "token_embedding": _EMBEDDING,
    "position_embedding": "wpe.weight",
    "final_layer_norm/scale": "ln_f.weight",
    "final_layer_norm/bias": "ln_f.bias",
    "logits_dense/kernel": _HEAD,
}
_IN_LAYER = {
    "pre_attention_layer_norm": ("ln_1", None),
    # Queries, keys and values are thirds of one projection.
    "attention/query": ("attn.c_attn", 0),
    "attention/key": ("attn.c_attn", 1),
    "attention/value": ("attn.c_attn", 2),
    "attention/out": ("attn.c_proj", None),
    "pre_mlp_layer_norm": ("ln_2", None),
    "mlp/wi": ("mlp.c_fc", None),
    "mlp/wo": ("mlp.c_proj", None),
}


def open_model(directory: Path, values: dict[str, Any], has_weights: bool = True) -> StoredModel:
    """Opens a directory whose config.json holds ``values``; see ``formats``.

    A text starts with ``bos_token_id`` and ends with ``eos_token_id``.
    """
    config = _read_config(values, directory / CONFIG_NAME)
    rows = their_ids(*_ids(values, directory)[:3])
    left, config = _settled(open_tensors(directory) if has_weights else {}, config, directory)
    names = _names(config)
    tensors = {
        path: _ours(path, left[name], rows, third)
        for path, (name, third) in names.items()
        if name in left
    }
    used = {name for name, _ in names.values()}
    return StoredModel(
        # Unused tensors keep their names, so that loading refuses them.
        tensors=tensors | {name: left[name] for name in left if name not in used},
        config=config,
        vocabulary=read_vocabulary(directory, values),
        directory=directory,
        metadata={"model_type": values["model_type"]},
    )


def check_supported(values: dict[str, Any], directory: Path) -> list[int]:
    """Returns ``_ids``; raises ``InputError`` if config.json, of ``values``, is not supported."""
    _read_config(values, directory / CONFIG_NAME)
    return _ids(values, directory)


def read_vocabulary(directory: Path, values: dict[str, Any]) -> MappedVocabulary | None:
    """Reads the vocabulary of a directory, or of the one above a checkpoint of a training."""
    num_ids, start_id, eos_id, *more = check_supported(values, directory)
    folder = tokenizer_folder(directory)
    settings = read_if_there(folder / SETTINGS_NAME)
    kind = class_of(settings, values, _TOKENIZER)
    if kind not in (_TOKENIZER, *UNCHANGED):
        # Other classes make other steps of their settings.
        values = values | {"vocab_size": num_ids}
        return vocabulary_files.read_vocabulary(directory, values, start_id, [eos_id, *more])
    if (tokenizer := read_tokenizer(folder) or read_two_files(folder)) is None:
        return None
    _check_added(folder, settings, tokenizer)
    if kind == _TOKENIZER and isinstance(tokenizer.model, models.BPE):
        # This class makes the steps of its settings, whichever a tokenizer.json has.
        _set_steps(tokenizer, bool(settings.get("add_prefix_space")))
    return MappedVocabulary(
        tokenizer, num_ids=num_ids, start_id=start_id, eos_id=eos_id, more_eos_ids=more
    )


def read_two_files(directory: Path) -> tokenizers.Tokenizer | None:
    """Reads a tokenizer from before ``tokenizer.json``; returns None without its files."""
    files = directory / VOCAB_NAME, directory / MERGES_NAME
    if not all(file.is_file() for file in files):
        return None
    with reading_tokenizer(directory):
        tokenizer = tokenizers.Tokenizer(models.BPE.from_file(*map(str, files)))
    _set_steps(tokenizer, add_prefix_space=False)
    return tokenizer


def _set_steps(tokenizer: tokenizers.Tokenizer, add_prefix_space: bool) -> None:
    """Gives a tokenizer the steps of transformers' ``GPT2Tokenizer``."""
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()


def _check_added(
    directory: Path, settings: dict[str, Any], tokenizer: tokenizers.Tokenizer
) -> None:
    """Raises ``InputError`` if the tokenizer lacks a token that transformers adds from a file."""
    added = list(read_if_there(directory / ADDED_NAME))
    with describing(directory / SETTINGS_NAME, "tokenizer"):
        listed = settings.get("added_tokens_decoder") or {}
        added += [token["content"] for token in listed.values()]
    lacking = [token for token in added if tokenizer.token_to_id(token) is None]
    if lacking:
        raise InputError(
            f"the tokenizer in {directory} lacks the added token {lacking[0]!r}: save it with its "
            "tokenizer.json (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
        )


def _ours(path: str, tensor: Tensor, rows: np.ndarray, third: int | None) -> Tensor:
    """Converts a tensor to our parameter ``path``; ``rows[i]`` is their id of our id i."""
    if path == "token_embedding":
        return renumbered(tensor, rows)
    if path == "logits_dense/kernel":
        return transposed(renumbered(tensor, rows))
    return tensor if third is None else _third(tensor, third)


def _third(tensor: Tensor, place: int) -> Tensor:
    """Returns third ``place`` (0, 1 or 2) of the tensor's last axis, lazily."""
    # A scalar in a damaged file gets width 0 and fails the later check of shapes.
    width = math.prod(tensor.shape[-1:]) // 3

    def read(index):
        start, stop, _ = index[-1].indices(width)
        return tensor.read((*index[:-1], slice(place * width + start, place * width + stop)))

    return dataclasses.replace(tensor, shape=(*tensor.shape[:-1], width), read=read)


def _ids(values: dict[str, Any], directory: Path) -> list[int]:
    """Returns ``[num_ids, start_id, eos_id, …]`` in their numbering."""
    path, entries = generation_config.generation_entries(directory, values)
    num_ids, eos = values["vocab_size"], entries.get("eos_token_id")
    several = eos if isinstance(eos, list) and eos else [eos]
    start_id = entries.get("bos_token_id", several[0])
    for entry, tokens in (("bos_token_id", [start_id]), ("eos_token_id", several)):
        if not all(type(token) is int and 0 <= token < num_ids for token in tokens):
            raise InputError(
                f"{path} has {entry} {entries.get(entry)!r} and vocab_size {num_ids}: set "
                "it to a token's id"
            )
    return [num_ids, start_id, *several]


def _read_config(values: dict[str, Any], path: Path) -> GPTConfig:
    present = entries(values, _ALIASES, path)
    activation = present.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise InputError(
            f"{path} has activation_function {activation!r}: supported are "
            f"{', '.join(_ACTIVATIONS)}"
        )
    for name, needed in _FIXED.items():
        if present.get(name, needed) != needed:
            raise InputError(f"{path} has {name} {present[name]}: give a GPT-2 without it")
    check_weights(values, path)
    names = {"emb_dim": "n_embd", "num_heads": "n_head", "num_layers": "n_layer"}
    names |= {"mlp_dim": "n_inner", "max_length": "n_positions", "dropout_rate": "resid_pdrop"}
    with describing(path, "GPT-2", names):
        return GPTConfig(
            # Our start token has a row that theirs lacks.
            vocab_size=present["vocab_size"] + 1,
            emb_dim=present["n_embd"],
            num_heads=present["n_head"],
            num_layers=present["n_layer"],
            mlp_dim=present.get("n_inner", 4 * present["n_embd"]),
            max_length=present["n_positions"],
            logits_via_embedding=present.get("tie_word_embeddings", True),
            dropout_rate=present.get("resid_pdrop", 0.1),
            layer_norm_epsilon=present.get("layer_norm_epsilon", 1e-5),
        )


def _settled(
    tensors: dict[str, Tensor], config: GPTConfig, directory: Path
) -> tuple[dict[str, Tensor], GPTConfig]:
    """Returns tensors without prefixes and masks, and ``config``, untied if the output layer is.

    As in transformers, a stored output layer that differs from the embedding overrides a tie.
    """
    bare = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in unwrapped(tensors, ("transformer",), directory).items()
    }
    bare = {name: tensor for name, tensor in bare.items() if not _MASK.fullmatch(name)}
    if config.logits_via_embedding and _EMBEDDING in bare:
        if same_table(bare.get(_HEAD, bare[_EMBEDDING]), bare[_EMBEDDING]):
            bare.pop(_HEAD, None)
        else:
            config = dataclasses.replace(config, logits_via_embedding=False)
    return bare, config


def _names(config: GPTConfig) -> dict[str, tuple[str, int | None]]:
    """Returns the tensor of each of our parameters, and its third (0 to 2) or None if whole."""
    names = {path: (name, None) for path, name in _TOP.items()}
    if config.logits_via_embedding:
        del names["logits_dense/kernel"]
    for layer in range(config.num_layers):
        for ours, (theirs, third) in _IN_LAYER.items():
            weight = "scale" if ours.endswith("norm") else "kernel"
            names[f"layers_{layer}/{ours}/{weight}"] = f"h.{layer}.{theirs}.weight", third
            names[f"layers_{layer}/{ours}/bias"] = f"h.{layer}.{theirs}.bias", third
    return names


FORMAT = Format(
    recognizes=lambda directory, values: bool(values) and values.get("model_type") == "gpt2",
    open_model=open_model,
    config=GPTConfig,
    check_supported=check_supported,
)
