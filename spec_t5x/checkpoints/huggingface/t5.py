"""Hugging Face's T5, mT5 and umT5 directories, read and written.

A directory holds config.json, weights (``model.safetensors`` or ``pytorch_model.bin``, whole or in
shards) and, except for ByT5, a tokenizer (``vocabulary_files``). *Our* names and ids are this
package's, *theirs* are transformers'. Our ids 0, 1 and 0 start, end and pad a text, as T5's do. If
theirs differ, as in MADLAD-400, CodeT5+ and Pile-T5, they are renumbered (``mapped_vocabulary``).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.checkpoints.huggingface import generation_config, vocabulary_files, weight_files
from spec_t5x.checkpoints.huggingface.generation_config import GENERATION, GENERATION_NAME, TASKS
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing, write_json
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensors import Report, Tensor, read_tensors
from spec_t5x.data.mapped_vocabulary import MappedVocabulary, their_ids
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.models.binding import expected_shapes, known_families
from spec_t5x.models.t5 import NetworkConfig, T5Config
from spec_t5x.types import EOS_ID, PAD_ID

# transformers' names of activations (``dense_act_fn``), by ours; the names in a row are synonyms.
# T5X's "gelu" is the tanh approximation; transformers' "gelu", the exact one, is not in T5X.
_ACTIVATIONS = {
    "relu": ("relu",),
    "gelu": ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
    "silu": ("silu", "swish"),
    "linear": ("linear",),
    "tanh": ("tanh",),
    "sigmoid": ("sigmoid",),
}
_OURS = {theirs: ours for ours, names in _ACTIVATIONS.items() for theirs in names}
# ``feed_forward_proj`` is an activation, or "gated-" and an activation: "gated-gelu" has gelu_new.
_GATED, _GATED_GELU = "gated", "gated-gelu"

# Fields of ``T5Config``, each with transformers' entry and its default. A default of None requires
# the entry, except that ``num_decoder_layers`` defaults to ``num_layers``.
_SIZES = {
    "vocab_size": ("vocab_size", None),
    "emb_dim": ("d_model", None),
    "head_dim": ("d_kv", None),
    "mlp_dim": ("d_ff", None),
    "num_heads": ("num_heads", None),
    "num_encoder_layers": ("num_layers", None),
    "num_decoder_layers": ("num_decoder_layers", None),
    "dropout_rate": ("dropout_rate", 0.1),
    "relpos_num_buckets": ("relative_attention_num_buckets", 32),
    "relpos_max_distance": ("relative_attention_max_distance", 128),
    "layer_norm_epsilon": ("layer_norm_epsilon", 1e-6),
}

# Other names that transformers reads for entries.
_ALIASES = {
    **{"hidden_size": "d_model", "num_hidden_layers": "num_layers"},
    **{"num_attention_heads": "num_heads", "head_dim": "d_kv"},
}

# Entries that make transformers drop keys and values of a T5 or GPT-2, or refuse to run it.
_CACHE_ENTRIES = ("sliding_window", "attention_chunk_size", "per_layer_config")
# Supported values of ``model_type``; only umT5 has a relative bias in every layer.
_UMT5 = "umt5"
_KINDS = ("t5", "mt5", _UMT5)
# Rows of the embedding in every size of mT5.
_MT5_ROWS = 250112

START, EOS, PAD = "decoder_start_token_id", "eos_token_id", "pad_token_id"
_BOS, EOS_IDS = "bos_token_id", "eos_token_ids"
_SPECIAL_IDS = {START: PAD_ID, EOS: EOS_ID, PAD: PAD_ID}
# The embedding of a renumbered model is padded to a multiple of this, so that devices divide it.
_ROWS = 128

_SHARED = "shared.weight"
_LM_HEAD = "lm_head.weight"
_SOURCES, _TARGETS = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
# The tensors with a row for each id. The first that a checkpoint has replaces absent ones.
_TABLES = (_SHARED, _SOURCES, _TARGETS, _LM_HEAD)
# Modules with which names begin.
_TOP = ("shared", "encoder", "decoder", "lm_head")

# transformers' modules in a layer, by ours: encoder layers hold two blocks, decoder layers three.
_MODULES = {
    "encoder/pre_attention_layer_norm": "layer.0.layer_norm",
    "encoder/attention": "layer.0.SelfAttention",
    "encoder/pre_mlp_layer_norm": "layer.1.layer_norm",
    "encoder/mlp": "layer.1.DenseReluDense",
    "decoder/pre_self_attention_layer_norm": "layer.0.layer_norm",
    "decoder/self_attention": "layer.0.SelfAttention",
    "decoder/pre_cross_attention_layer_norm": "layer.1.layer_norm",
    "decoder/encoder_decoder_attention": "layer.1.EncDecAttention",
    "decoder/pre_mlp_layer_norm": "layer.2.layer_norm",
    "decoder/mlp": "layer.2.DenseReluDense",
}
_MAPS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"

# A leftover of the original conversion that no release of transformers uses.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def open_model(directory: Path, values: dict[str, Any], has_weights: bool = True) -> StoredModel:
    """Opens the model in ``directory``, whose config.json holds ``values``; see ``Format``."""
    ids = check_supported(values, directory)
    config = read_config(values, directory / CONFIG_NAME)
    tensors = weight_files.open_tensors(directory) if has_weights else {}
    tensors = weight_files.unwrapped(tensors, _TOP, directory)
    if tensors and not any(".decoder." in f".{name}" for name in tensors):
        raise InputError(f"{directory} holds no decoder: give a whole encoder-decoder")
    left, config = _settled(tensors, config, values, directory)
    vocabulary = read_vocabulary(directory, values)
    # A vocabulary that is not T5's Unigram model is renumbered whatever its special ids.
    if not _are_t5s(ids) or isinstance(vocabulary, MappedVocabulary):
        left, config = renumbered_model(left, config, ids, _TABLES)
    names = tensor_names(config)
    return StoredModel(
        tensors=by_our_paths(left, names),
        names={path: name for path, (name, _) in names.items()},
        config=config,
        vocabulary=vocabulary,
        directory=directory,
        metadata={"model_type": values["model_type"], PAD: ids[PAD]},
    )


def by_our_paths(
    tensors: dict[str, Tensor], names: dict[str, tuple[str, bool]]
) -> dict[str, Tensor]:
    """Returns tensors by our paths; the others keep their names, which ``check_tensors`` refuses.

    ``names`` maps our path to a tensor's name and to whether the tensor is to be transposed.
    """
    left, found = dict(tensors), {}
    for path, (name, is_transposed) in names.items():
        if name in left:
            tensor = left.pop(name)
            found[path] = weight_files.transposed(tensor) if is_transposed else tensor
    return found | left


def renumbered_model(
    tensors: dict[str, Tensor], config: NetworkConfig, ids: dict[str, Any], tables: Sequence[str]
) -> tuple[dict[str, Tensor], NetworkConfig]:
    """Returns tensors and config with the rows of ``tables`` by our ids; see ``special_ids``."""
    theirs = their_ids(config.vocab_size, ids[START], ids[EOS])
    found = {name: tensors[name] for name in tables if name in tensors}
    added = -len(theirs) % _ROWS
    rows = np.pad(theirs, (0, added))
    config = dataclasses.replace(config, vocab_size=len(rows), added_rows=1 + added)
    found = {name: weight_files.renumbered(tensor, rows) for name, tensor in found.items()}
    return tensors | found, config


def write_model(stage: Path, stored: StoredModel, dtype: str, report: Report | None) -> None:
    """Writes a checkpoint for ``T5ForConditionalGeneration.from_pretrained``; see ``Writer``.

    The ``model_type`` is umt5 if each layer has a relative bias, and otherwise the metadata's or
    a guess by the vocabulary's size. Of other metadata, only settings of decoding are written.
    """
    config, vocabulary, ours = stored.config, stored.known_vocabulary(), None
    ids = _SPECIAL_IDS | {PAD: stored.metadata.get(PAD, PAD_ID)}
    kind = _UMT5 if config.relpos_per_layer else stored.metadata.get("model_type")
    is_mt5 = config.vocab_size == _MT5_ROWS and not config.logits_via_embedding
    kind = kind or ("mt5" if is_mt5 else "t5")
    if isinstance(vocabulary, MappedVocabulary):
        # A draft for a renumbered target has no metadata of it; EOS pads, as in ``special_ids``.
        pad = stored.metadata.get(PAD, vocabulary.eos_id)
        ids = {START: vocabulary.start_id, EOS: vocabulary.eos_id, PAD: pad}
        ours = vocabulary.from_theirs(range(vocabulary.num_ids))
        config = dataclasses.replace(config, vocab_size=vocabulary.num_ids, added_rows=0)
    if len(vocabulary.eos_ids) > 1:
        ids = ids | {EOS: (vocabulary.to_theirs if ours else list)(vocabulary.eos_ids)}
    generation = dict(stored.metadata.get(GENERATION, {}))
    tasks = {TASKS: generation.pop(TASKS)} if TASKS in generation else {}
    write_json(stage / CONFIG_NAME, config_values(config, dtype, kind) | ids | tasks)
    write_json(stage / GENERATION_NAME, generation | ids)
    settings = vocabulary_files.settings_of(vocabulary, ids[PAD])
    write_json(stage / vocabulary_files.SETTINGS_NAME, settings)
    names = tensor_names(config)

    def written() -> Iterator[tuple[str, np.ndarray]]:
        for path, tensor in read_tensors(stored.tensors, str(stored.directory), dtype, report):
            name, is_transposed = names[path]
            tensor = tensor.T if is_transposed else tensor
            yield name, tensor[ours] if ours and name in _TABLES else tensor

    weight_files.write_safetensors(stage, written())


def tensor_names(config: T5Config) -> dict[str, tuple[str, bool]]:
    """Returns, by our paths, their name of each parameter and whether they store its transpose.

    transformers stores linear maps as ``[outputs, inputs]`` and relative biases as
    ``[buckets, heads]``: both are the transpose of ours. For example
    ``encoder/layers_0/attention/query/kernel`` is
    ``("encoder.block.0.layer.0.SelfAttention.q.weight", True)``.
    """
    others = {
        "token_embedder/embedding": (_SHARED, False),
        "decoder/logits_dense/kernel": (_LM_HEAD, True),
        "encoder/encoder_norm/scale": ("encoder.final_layer_norm.weight", False),
        "decoder/decoder_norm/scale": ("decoder.final_layer_norm.weight", False),
        "encoder/relpos_bias/rel_embedding": (f"encoder.block.0.{_BIAS}", True),
        "decoder/relpos_bias/rel_embedding": (f"decoder.block.0.{_BIAS}", True),
    }
    return {path: others.get(path) or _name_in_layer(path) for path in expected_shapes(config)}


def _name_in_layer(path: str) -> tuple[str, bool]:
    stack, layer, module, *inner = path.split("/")
    block = f"{stack}.block.{layer.removeprefix('layers_')}"
    if module == "relpos_bias":
        return f"{block}.{_BIAS}", True
    names = [_MODULES[f"{stack}/{module}"], *(_MAPS.get(name, name) for name in inner[:-1])]
    return f"{block}.{'.'.join(names)}.weight", inner[-1] == "kernel"


def _settled(
    tensors: dict[str, Tensor], config: T5Config, values: dict[str, Any], directory: Path
) -> tuple[dict[str, Tensor], T5Config]:
    """Returns tensors and configuration with one embedding and, if not tied, an output layer.

    As in transformers, a table in the checkpoint is used even if config.json ties it to another
    one; config.json alone decides whether the last states are scaled.
    """
    tensors.pop(_UNUSED, None)
    tables = {name: tensors.pop(name) for name in _TABLES if name in tensors}
    # ``check_tensors`` reports that the checkpoint is incomplete.
    if not tables:
        return tensors, config
    first = next(iter(tables.values()))
    embedding = tables.get(_TARGETS, first)
    weight_files.check_shared(tables.get(_SOURCES, first), embedding, directory)
    head = tables.get(_LM_HEAD, first)
    tensors[_SHARED] = embedding
    if not config.logits_via_embedding:
        if _LM_HEAD in tables or values.get("tie_word_embeddings") is not False:
            tensors[_LM_HEAD] = head
    elif not weight_files.same_table(head, embedding):
        tensors[_LM_HEAD] = weight_files.scaled(head, config.output_scale)
        config = dataclasses.replace(config, logits_via_embedding=False)
    return tensors, config


def check_supported(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Raises ``InputError`` unless config.json is of a supported T5; returns ``special_ids``."""
    path, model_type = directory / CONFIG_NAME, values.get("model_type")
    if model_type not in _KINDS:
        raise InputError(f"{path} has model_type {model_type!r}: give a {known_families()}")
    check_whole(values, path)
    ids = special_ids(values, directory)
    read_config(values, path)
    return ids


def check_whole(values: dict[str, Any], path: Path) -> None:
    """Raises ``InputError`` for an encoder-only model, and as ``check_weights``."""
    saved, others = str(values.get("architectures")), ("EncoderModel", "TokenClassification")
    if values.get("is_encoder_decoder", True) is False or any(each in saved for each in others):
        raise InputError(f"{path} is an encoder-only model: give an encoder-decoder")
    weight_files.check_weights(values, path)


def special_ids(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the ids that start, end and pad a text, under ``START``, ``EOS`` and ``PAD``.

    Without the entry, ``bos_token_id`` starts or EOS pads a text. If several ids end a text, EOS
    is the first, or T5's if the start is T5's too, and ``EOS_IDS`` lists all, EOS first.
    """
    starts = {START, _BOS}
    path, found = generation_config.generation_entries(directory, values)
    if not starts & found.keys():
        # transformers generates nothing without a start: use config.json's, else T5's.
        _, others = generation_config.config_entries(directory, values)
        found = ({} if starts & others.keys() else _SPECIAL_IDS) | others | found
    start, eos, pad = found.get(START, found.get(_BOS)), found.get(EOS), found.get(PAD)
    if eos is None:
        raise InputError(
            f"{path} has no {EOS}, so that no text ends in transformers: set it (T5's is {EOS_ID})"
        )
    several = eos if isinstance(eos, list) and eos else [eos]
    if start == PAD_ID and EOS_ID in several:
        # T5's EOS comes first. Any PAD is right if none is given, as outputs are cut at their end.
        several = [EOS_ID, *(token for token in several if token != EOS_ID)]
        pad = PAD_ID if pad is None else pad
    pad = several[0] if pad is None else pad
    most = values.get("vocab_size") or math.inf
    if not isinstance(most, int | float):
        raise InputError(f"{directory / CONFIG_NAME} has vocab_size {most!r}: set it to a number")
    for name, tokens in ((START, [start]), (EOS, several), (PAD, [pad])):
        if not all(type(each) is int and 0 <= each < most for each in tokens):
            raise InputError(
                f"{directory} has {name} {eos if name == EOS else tokens[0]!r} and {CONFIG_NAME} "
                f"vocab_size {values.get('vocab_size')}: set it to a token's id"
            )
    return {START: start, EOS: several[0], EOS_IDS: several, PAD: pad}


def read_config(values: dict[str, Any], path: Path) -> T5Config:
    """Makes the configuration of a config.json's values; ``path`` is for messages."""
    present = entries(values, _ALIASES, path)
    with describing(path, "T5", {ours: theirs for ours, (theirs, _) in _SIZES.items()}):
        present.setdefault("num_decoder_layers", present["num_layers"])
        sizes = {
            ours: present[theirs] if default is None else present.get(theirs, default)
            for ours, (theirs, default) in _SIZES.items()
        }
        # Whether transformers 5 multiplies the last states by ``d_model ** -0.5``; never for mT5.
        is_scaled = values.get("tie_word_embeddings") is not False
        is_scaled = values.get("scale_decoder_outputs", is_scaled)
        return T5Config(
            **sizes,
            mlp_activations=_activations(values, path),
            logits_via_embedding=values["model_type"] != "mt5" and bool(is_scaled),
            relpos_per_layer=values["model_type"] == _UMT5,
        )


def entries(values: dict[str, Any], aliases: dict[str, str], path: Path) -> dict[str, Any]:
    """Returns entries of config.json that are not null, by their main names.

    Raises ``InputError`` for names of an entry that differ, ``_CACHE_ENTRIES``, and any is_causal.
    """
    present = generation_config.present(values)
    for alias, name in aliases.items():
        if alias in present and (one := present[alias]) != present.setdefault(name, one):
            raise InputError(f"{path} has {alias} {one} and {name} {present[name]}: leave out one")
    causal = "is_causal" if "is_causal" in values else None
    if name := next(filter(present.get, _CACHE_ENTRIES), causal):
        raise InputError(f"{path} has {name} {values[name]!r}: give a model without it")
    return present


def _activations(values: dict[str, Any], path: Path) -> tuple[str, ...]:
    """Returns our activation, with "linear" if gated; ``dense_act_fn`` precedes the projection."""
    usual = "relu" if values["model_type"] == "t5" else _GATED_GELU
    projection = str(values.get("feed_forward_proj", usual))
    gate, _, name = projection.rpartition("-")
    if gate not in ("", _GATED):
        raise InputError(
            f"{path} has feed_forward_proj {projection!r}: give ACTIVATION or {_GATED}-ACTIVATION"
        )
    name = values.get("dense_act_fn", "gelu_new" if projection == _GATED_GELU else name)
    if name not in _OURS:
        raise InputError(
            f"{path} has the activation {name!r} (feed_forward_proj {projection!r}): supported are "
            f"{', '.join(_OURS)}"
        )
    is_gated = values.get("is_gated_act", bool(gate))
    return (_OURS[name], "linear") if is_gated else (_OURS[name],)


def config_values(config: T5Config, dtype: str, kind: str) -> dict[str, Any]:
    """Returns config.json, without special ids, for transformers; ``kind`` is the model_type."""
    name, *gate = config.mlp_activations
    if name not in _ACTIVATIONS or gate not in ([], ["linear"]):
        raise InputError(
            f"transformers has no T5 with activations {config.mlp_activations}: it has "
            f"{', '.join(_ACTIVATIONS)}, alone or with linear after it"
        )
    projection = f"{_GATED}-{_ACTIVATIONS[name][0]}" if gate else _ACTIVATIONS[name][0]
    return {
        "architectures": [f"{kind.upper()}ForConditionalGeneration"],
        "model_type": kind,
        "is_encoder_decoder": True,
        **{theirs: getattr(config, ours) for ours, (theirs, _) in _SIZES.items()},
        "feed_forward_proj": projection.replace("gated-gelu_new", _GATED_GELU),
        # Also decides, except for mT5 in version 5 and all in 5.0, whether logits are rescaled.
        "tie_word_embeddings": config.logits_via_embedding,
        "torch_dtype": dtype,
    }


def read_vocabulary(directory: Path, values: dict[str, Any]) -> Vocabulary | None:
    """Reads the vocabulary of a checkpoint with config.json ``values``; None if no file has one."""
    ids = special_ids(values, directory)
    start_id = None if _are_t5s(ids) else ids[START]
    with describing(directory, "vocabulary"):
        return vocabulary_files.read_vocabulary(directory, values, start_id, ids[EOS_IDS])


def _are_t5s(ids: dict[str, Any]) -> bool:
    """Tells whether START and EOS are T5's; no id is renumbered because of PAD alone."""
    return (ids[START], ids[EOS]) == (PAD_ID, EOS_ID)
