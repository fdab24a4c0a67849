"""Hugging Face's T5, mT5 and umT5 directories, read and written without transformers.

config.json, weights (``model.safetensors`` or ``pytorch_model.bin``, whole or in shards) and a
tokenizer (``vocabulary_files``), which ByT5 does without: T5 1.0, T5 1.1, Flan-T5, mT5, umT5 and
ByT5. Where other ids than T5's start, end and pad a text, all are renumbered
(``data.mapped_vocabulary``): MADLAD-400, CodeT5+, Pile-T5.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.checkpoints.huggingface import generation_config, vocabulary_files
from spec_t5x.checkpoints.huggingface.generation_config import (
    GENERATION,
    GENERATION_NAME,
    TASKS,
)
from spec_t5x.checkpoints.huggingface.weight_files import (
    WRAPPERS,
    check_shared,
    open_tensors,
    renumbered,
    same_table,
    scaled,
    transposed,
    unwrapped,
    write_safetensors,
)
from spec_t5x.checkpoints.storage.files import (
    CONFIG_NAME,
    describing,
    write_json,
)
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensors import Report, Tensor, read_tensors
from spec_t5x.data.mapped_vocabulary import MappedVocabulary, their_ids
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.models.binding import ModelConfig, expected_shapes, known_families
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import EOS_ID, PAD_ID

# Their names for activations (``dense_act_fn``). All of one line are one function there: the tanh
# approximation is what T5X calls "gelu"; their "gelu", the exact one, has no equal there.
_ACTIVATIONS = {
    "relu": ("relu",),
    "gelu": ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
    "silu": ("silu", "swish"),
    "linear": ("linear",),
    "tanh": ("tanh",),
    "sigmoid": ("sigmoid",),
}
_OURS = {theirs: ours for ours, names in _ACTIVATIONS.items() for theirs in names}
_GATED = "gated"
# The one combination that has a name of its own there; see ``_activations``.
_GATED_GELU = f"{_GATED}-gelu"

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

# Their names of the networks; umT5's alone has a relative bias in every layer.
_UMT5 = "umt5"
_KINDS = ("t5", "mt5", _UMT5)
# Other encoder-decoders that people try.
_OTHERS = {
    "bart": "BART",
    "longt5": "LongT5 (local attention in the encoder)",
    "m2m_100": "M2M-100 or NLLB",
    "marian": "Marian",
    "mbart": "mBART",
    "pegasus": "Pegasus",
    "switch_transformers": "Switch Transformer (experts)",
    "whisper": "Whisper (audio)",
}

# Rows of mT5's embedding, of every size.
_MT5_ROWS = 250112

START, EOS, PAD = "decoder_start_token_id", "eos_token_id", "pad_token_id"
MORE_EOS = "more_eos_ids"
_SPECIAL_IDS = {START: PAD_ID, EOS: EOS_ID, PAD: PAD_ID}
# Rows of a renumbered vocabulary are a multiple of this: chips and shards divide them.
_ROWS = 128

_SHARED = "shared.weight"
_LM_HEAD = "lm_head.weight"
_SOURCES, _TARGETS = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
# They have a row for each id. Where one is absent, the first that is there is in its place.
_TABLES = (_SHARED, _SOURCES, _TARGETS, _LM_HEAD)

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
_BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"
_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "out": "o"}

# A leftover of the original conversion that no release of transformers uses.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def open_model(directory: Path, values: dict[str, Any]) -> StoredModel:
    """Opens a model that transformers wrote; see ``formats``.

    Args:
        directory, values: the checkpoint and its config.json.
    """
    ids = check_supported(values, directory)
    config = _read_config(values, directory / CONFIG_NAME)
    tensors = unwrapped(open_tensors(directory), (*WRAPPERS, "transformer."))
    left, config = _settled(tensors, config, values, directory)
    metadata = {"model_type": values["model_type"]}
    if not _are_t5s(ids):
        left, config = renumbered_model(left, config, ids, _TABLES)
        metadata[PAD] = ids[PAD]
    names = tensor_names(config)
    return StoredModel(
        tensors=by_our_paths(left, names),
        names=names,
        config=config,
        vocabulary=read_vocabulary(directory, values, ids),
        directory=directory,
        metadata=metadata,
    )


def by_our_paths(
    tensors: dict[str, Tensor], names: dict[str, tuple[str, bool]]
) -> dict[str, Tensor]:
    """Tensors by our paths and as we have them; ``names`` are theirs, and which are transposed.

    What belongs to no parameter stays, to be refused by its own name.
    """
    left, found = dict(tensors), {}
    for path, (name, is_transposed) in names.items():
        if name in left:
            tensor = left.pop(name)
            found[path] = transposed(tensor) if is_transposed else tensor
    return found | left


def renumbered_model(
    tensors: dict[str, Tensor], config: ModelConfig, ids: dict[str, Any], tables: Sequence[str]
) -> tuple[dict[str, Tensor], ModelConfig]:
    """Tensors and configuration by our ids in place of theirs; ``tables`` have a row for each."""
    theirs = their_ids(config.vocab_size, ids[START], ids[EOS])
    for tensor in (tensors[name] for name in tables if name in tensors):
        if tensor.shape[:1] != (config.vocab_size,):
            raise InputError(
                f"{tensor.name} is {list(tensor.shape)} and the configuration has vocab_size "
                f"{config.vocab_size}: give the configuration that it was saved with"
            )
    added = -len(theirs) % _ROWS
    rows = np.pad(theirs, (0, added))
    theirs_by_ours = {name: renumbered(tensors[name], rows) for name in tables if name in tensors}
    config = dataclasses.replace(config, vocab_size=len(rows), added_rows=1 + added)
    return tensors | theirs_by_ours, config


def write_model(stage: Path, stored: StoredModel, dtype: str, report: Report | None) -> None:
    """Writes what ``T5ForConditionalGeneration.from_pretrained`` reads; see ``formats``.

    The model stays a ``t5`` or ``mt5`` if it was one; otherwise its network decides. Its further
    entries are left out: transformers owns config.json.
    """
    kind = _model_type(stored)

    def values_of(config: T5Config, ids: dict[str, Any]) -> dict[str, Any]:
        return config_values(config, dtype, kind) | ids

    write_as(stage, stored, dtype, report, values_of, tensor_names, _TABLES)


def write_as(
    stage: Path,
    stored: StoredModel,
    dtype: str,
    report: Report | None,
    values_of: Callable[[ModelConfig, dict[str, Any]], dict[str, Any]],
    names_of: Callable[[ModelConfig], dict[str, tuple[str, bool]]],
    tables: Sequence[str],
) -> None:
    """Writes a model of a kind, which says what config.json and the tensors' names are.

    ``tables`` are the tensors that have a row for each id.
    """
    config, vocabulary, ids, ours = stored.config, stored.known_vocabulary(), _SPECIAL_IDS, None
    if len(vocabulary.eos_ids) > 1:
        ids = ids | {EOS: list(vocabulary.eos_ids)}
    if isinstance(vocabulary, MappedVocabulary):
        eos = [vocabulary.eos_id, *vocabulary.more_eos_ids]
        eos = eos if vocabulary.more_eos_ids else vocabulary.eos_id
        ids = {START: vocabulary.start_id, EOS: eos, PAD: stored.metadata[PAD]}
        ours = vocabulary.from_theirs(range(vocabulary.num_ids))
        config = dataclasses.replace(config, vocab_size=vocabulary.num_ids, added_rows=0)
    generation = dict(stored.metadata.get(GENERATION, {}))
    tasks = {TASKS: generation.pop(TASKS)} if TASKS in generation else {}
    write_json(stage / CONFIG_NAME, values_of(config, ids) | tasks)
    write_json(stage / GENERATION_NAME, generation | ids)
    settings = vocabulary_files.settings_of(vocabulary, ids[PAD])
    write_json(stage / vocabulary_files.SETTINGS_NAME, settings)
    names = names_of(config)

    def written() -> Iterator[tuple[str, np.ndarray]]:
        for path, tensor in read_tensors(stored.tensors, str(stored.directory), dtype, report):
            name, is_transposed = names[path]
            tensor = tensor.T if is_transposed else tensor
            yield name, tensor[ours] if ours and name in tables else tensor

    write_safetensors(stage, written())


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
        return f"{stack}.block.0.{_BIAS}", True
    if module == f"{stack}_norm":
        return f"{stack}.final_layer_norm.weight", False
    index = module.removeprefix("layers_")
    if inner[0] == "relpos_bias":
        return f"{stack}.block.{index}.{_BIAS}", True
    block = (_IN_ENCODER if stack == "encoder" else _IN_DECODER)[inner[0]]
    prefix = f"{stack}.block.{index}.{block}"
    if inner[-1] == "scale":
        return f"{prefix}.weight", False
    return f"{prefix}.{_PROJECTIONS.get(inner[1], inner[1])}.weight", True


def _settled(
    tensors: dict[str, Tensor], config: T5Config, values: dict[str, Any], directory: Path
) -> tuple[dict[str, Tensor], T5Config]:
    """Tensors with one table for each use, and the configuration that fits the output layer.

    As in transformers a table that is there is used where its name says so, whatever config.json
    says of tying; the factor on the last states is config.json's alone.
    """
    tensors.pop(_UNUSED, None)
    tables = {name: tensors.pop(name) for name in _TABLES if name in tensors}
    # Absent when the checkpoint is incomplete, which the check of names reports.
    if not tables:
        return tensors, config
    first = next(iter(tables.values()))
    embedding = tables.get(_TARGETS, first)
    check_shared(tables.get(_SOURCES, first), embedding, directory)
    head = tables.get(_LM_HEAD, first)
    tensors[_SHARED] = embedding
    if not config.logits_via_embedding:
        if _LM_HEAD in tables or values.get("tie_word_embeddings") is not False:
            tensors[_LM_HEAD] = head
    elif not same_table(head, embedding):
        tensors[_LM_HEAD] = scaled(head, config.output_scale)
        config = dataclasses.replace(config, logits_via_embedding=False)
    return tensors, config


def check_supported(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Refuses models that would load and then decode something else; gives ``special_ids``."""
    path, model_type = directory / CONFIG_NAME, values.get("model_type")
    if model_type not in _KINDS:
        kind = _OTHERS.get(model_type, f"model of type {model_type!r}")
        raise InputError(f"{path} is of a {kind}, which is not read: give a {known_families()}")
    check_whole(values, path)
    return special_ids(values, directory)


def check_whole(values: dict[str, Any], path: Path) -> None:
    """Refuses an encoder alone, and rounded weights."""
    if values.get("is_encoder_decoder", True) is False:
        raise InputError(f"{path} is an encoder alone: give an encoder-decoder")
    if "quantization_config" in values:
        raise InputError(f"{path} is quantized: give float32, float16 or bfloat16 weights")


def special_ids(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The ids that start, end and pad a text, as transformers finds them.

    A text starts with ``bos_token_id`` where nothing else is said, and is padded with what ends it.
    Where several ids end a text, the first is ``EOS``'s, and the others are ``MORE_EOS``'s.
    """
    path, said = generation_config.said(directory, values)
    if _start_of(said) is None:
        # Transformers generates nothing: config.json's are taken, and T5's for those it lacks.
        path, said = generation_config.configured(directory, values)
        said = _SPECIAL_IDS | said if _start_of(said) is None else said
    start, eos, pad = _start_of(said), said.get(EOS), said.get(PAD)
    if eos is None:
        raise InputError(
            f"{path} has no {EOS}, so that in transformers no text would end: set it (T5's is "
            f"{EOS_ID})"
        )
    several = eos if isinstance(eos, list) and eos else [eos]
    if start == PAD_ID and EOS_ID in several:
        # T5's, and others beside it. Outputs are padded there, and here cut.
        several = [EOS_ID, *(token for token in several if token != EOS_ID)]
        pad = PAD_ID if pad is None else pad
    pad = several[0] if pad is None else pad
    most = values.get("vocab_size") or math.inf
    for name, tokens in ((START, [start]), (EOS, several), (PAD, [pad])):
        if not all(isinstance(each, int) and 0 <= each < most for each in tokens):
            raise InputError(
                f"{path} has {name} {eos if name == EOS else tokens[0]!r} and {CONFIG_NAME} "
                f"vocab_size {values.get('vocab_size')}: set it to a token's id"
            )
    found = {START: start, EOS: several[0], PAD: pad}
    return found | ({MORE_EOS: several[1:]} if several[1:] else {})


def _start_of(said: dict[str, Any]) -> Any:
    return said.get("bos_token_id") if said.get(START) is None else said[START]


def _read_config(values: dict[str, Any], path: Path) -> T5Config:
    # Values that transformers leaves out, or writes as null, at their defaults.
    present = {name: value for name, value in values.items() if value is not None}
    with describing(path, "T5"):
        present.setdefault("num_decoder_layers", present["num_layers"])
        sizes = {
            ours: present[theirs] if default is None else present.get(theirs, default)
            for ours, (theirs, default) in _SIZES.items()
        }
        return T5Config(
            **sizes,
            mlp_activations=_activations(present, path),
            logits_via_embedding=_rescales_logits(values),
            relpos_per_layer=values["model_type"] == _UMT5,
        )


def _activations(values: dict[str, Any], path: Path) -> tuple[str, ...]:
    """The activations, of ``feed_forward_proj`` or of the two entries that come before it."""
    usual = "relu" if values["model_type"] == "t5" else _GATED_GELU
    projection = values.get("feed_forward_proj", usual)
    gate, _, name = projection.rpartition("-")
    if gate not in ("", _GATED):
        raise InputError(
            f"{path} has feed_forward_proj {projection!r}: give {_GATED}- and an activation, or an "
            "activation"
        )
    name = "gelu_new" if projection == _GATED_GELU else name
    name = values.get("dense_act_fn", name)
    if name not in _OURS:
        raise InputError(
            f"{path} has the activation {name!r} (feed_forward_proj {projection!r}): supported are "
            f"{', '.join(_OURS)}"
        )
    is_gated = values.get("is_gated_act", bool(gate))
    return (_OURS[name], "linear") if is_gated else (_OURS[name],)


def _model_type(stored: StoredModel) -> str:
    """ "umt5" where layers have biases; else "t5" or "mt5": as config.json had it, or by size.

    ByT5 is a "t5" there. These two names differ in what transformers takes for granted, not
    in the network.
    """
    if stored.config.relpos_per_layer:
        return _UMT5
    by_size = "mt5" if stored.config.vocab_size == _MT5_ROWS else "t5"
    return stored.metadata.get("model_type") or by_size


def config_values(config: T5Config, dtype: str, kind: str) -> dict[str, Any]:
    """config.json for transformers, of version 4 and 5."""
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
        # Decides in every version whether the logits are rescaled, too.
        "tie_word_embeddings": config.logits_via_embedding,
        "torch_dtype": dtype,
        **_SPECIAL_IDS,
    }


def _rescales_logits(values: dict[str, Any]) -> bool:
    """Says whether transformers 5 multiplies the last states by ``d_model ** -0.5``.

    Those of mT5 never; of others ``scale_decoder_outputs`` says so, and where it is absent, as
    before version 5, ``tie_word_embeddings``.
    """
    if values["model_type"] == "mt5":
        return False
    if "scale_decoder_outputs" in values:
        return bool(values["scale_decoder_outputs"])
    return values.get("tie_word_embeddings") is not False


def read_vocabulary(
    directory: Path, values: dict[str, Any], ids: dict[str, Any] | None = None
) -> Vocabulary | None:
    """The vocabulary of a checkpoint whose config.json holds ``values``; None without files.

    ``ids`` are its ``special_ids`` where they have been read.
    """
    ids = ids or special_ids(values, directory)
    start_id = None if _are_t5s(ids) else ids[START]
    return vocabulary_files.read_vocabulary(directory, values, start_id, eos_ids(ids))


def _are_t5s(ids: dict[str, Any]) -> bool:
    """Says whether ids need no renumbering: others may end a text beside T5's."""
    return {name: ids[name] for name in _SPECIAL_IDS} == _SPECIAL_IDS


def eos_ids(ids: dict[str, Any]) -> list[int]:
    """All of ``special_ids`` that end a text."""
    return [ids[EOS], *ids.get(MORE_EOS, ())]
