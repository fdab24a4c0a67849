"""Hugging Face's T5 and mT5 directories, read and written without transformers.

Linear maps are stored there as ``[outputs, inputs]`` and relative biases as
``[buckets, heads]``: both are the transpose of T5X's. ``tensor_names`` is the one
table of names, for both directions.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

# Imported for its effect: it teaches numpy, and so safetensors, bfloat16.
import ml_dtypes  # noqa: F401
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.checkpoints.abstract import expected_shapes
from spec_t5x.checkpoints.files import (
    CONFIG_NAME,
    one_line,
    read_json,
    staged_directory,
    write_json,
)
from spec_t5x.checkpoints.loaded_model import LoadedModel
from spec_t5x.checkpoints.validate import (
    check_finite,
    check_shapes,
    check_vocabulary_fits,
)
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
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

# Where the weights may be, in order of preference.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

_SHARED = "shared.weight"
_LM_HEAD = "lm_head.weight"
# Copies of the embedding under other names.
_ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# A leftover of the original conversion that no release of transformers uses.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

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


def load_huggingface(
    directory: str | Path, *, dtype: str = "float32", on_host: bool = False
) -> LoadedModel:
    """Reads a T5 1.0, T5 1.1, Flan-T5, mT5 or ByT5 that transformers wrote.

    Args:
        directory: config.json, weights (``model.safetensors`` or
            ``pytorch_model.bin``, whole or in shards) and ``spiece.model``, which
            ByT5 does without.
        dtype: "float32" or "bfloat16", of the parameters and of ``config.dtype``.
        on_host: leave the parameters in host memory as numpy arrays, for
            callers that shard them; else they go to JAX's default device.

    Raises:
        InputError: files are absent or damaged, or the model is not one that
            decodes as T5 does.
    """
    directory = Path(directory)
    values = read_json(directory / CONFIG_NAME)
    _check_supported(values, directory)
    config = _read_config(values, directory / CONFIG_NAME, dtype)
    vocabulary = read_vocabulary(values, directory)
    check_vocabulary_fits(vocabulary, config, str(directory))
    tensors = dict(_read_tensors(directory, dtype))
    config = _settle_output_layer(tensors, values, config, directory)
    params = _to_params(tensors, config, str(directory))
    return LoadedModel(
        params=params if on_host else jax.device_put(params),
        config=config,
        vocabulary=vocabulary,
        directory=directory,
        metadata=values,
    )


def export_huggingface(
    directory: str | Path,
    loaded: LoadedModel,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
) -> None:
    """Writes a model so that ``T5ForConditionalGeneration.from_pretrained`` reads it.

    Args:
        directory: where; its parents are made.
        loaded: the model and its vocabulary.
        dtype: "float32" or "bfloat16", the type of the stored weights.
        overwrite: whether an earlier checkpoint may be replaced.

    Raises:
        InputError: the directory is taken, or transformers has no such T5.
    """
    from safetensors.numpy import save_file

    if dtype not in ("bfloat16", "float32"):
        raise InputError(f"stored dtype is {dtype!r}: choose bfloat16 or float32")
    config_values = _config_values(loaded.config, dtype)
    flat = flatten_dict(loaded.params, sep="/")
    tensors = {}
    for path, (name, transposed) in tensor_names(loaded.config).items():
        tensor = np.asarray(flat[path]).astype(jnp.dtype(dtype))
        tensors[name] = np.ascontiguousarray(tensor.T if transposed else tensor)
    with staged_directory(directory, overwrite=overwrite) as stage:
        write_json(stage / CONFIG_NAME, config_values)
        write_json(stage / "generation_config.json", _special_ids())
        write_json(stage / "tokenizer_config.json", _tokenizer_values(loaded.vocabulary))
        save_file(tensors, stage / "model.safetensors", metadata={"format": "pt"})
        loaded.vocabulary.save(stage)


def tensor_names(config: T5Config) -> dict[str, tuple[str, bool]]:
    """Their name of each of our parameters, and whether it is stored transposed.

    For example ``encoder/layers_0/attention/query/kernel`` is
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


# --- configuration -----------------------------------------------------------


def _check_supported(values: dict[str, Any], directory: Path) -> None:
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
    for name, needed in _special_ids().items():
        found = values.get(name, generation.get(name))
        if found not in (None, needed, [needed]):
            raise InputError(
                f"{path} has {name} {found}, T5 decodes with {needed}: give a "
                "checkpoint with T5's special ids"
            )


def _special_ids() -> dict[str, int]:
    return {
        "decoder_start_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }


def _read_config(values: dict[str, Any], path: Path, dtype: str) -> T5Config:
    """Our configuration; ``_settle_output_layer`` has the last word on the logits."""
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
            dtype=dtype,
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


def _config_values(config: T5Config, dtype: str) -> dict[str, Any]:
    """config.json for transformers, of version 4 and 5."""
    projections = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    if config.mlp_activations not in projections:
        raise InputError(
            f"transformers has no T5 with activations {config.mlp_activations}: "
            f"it has {', '.join(map(str, projections))}"
        )
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
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
        **_special_ids(),
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


def _settle_output_layer(
    tensors: dict[str, np.ndarray],
    values: dict[str, Any],
    config: T5Config,
    directory: Path,
) -> T5Config:
    """Decides what the output layer is.

    Drops tensors that say nothing new from ``tensors`` and returns the
    configuration with ``logits_via_embedding``.
    """
    tensors.pop(_UNUSED, None)
    _merge_aliases(tensors, directory)
    # Absent when the checkpoint is incomplete, which check_shapes reports.
    embedding = tensors.get(_SHARED)
    rescales = _rescales_logits(values)
    if rescales:
        head = tensors.pop(_LM_HEAD, embedding)
        if embedding is not None and not _same(head, embedding):
            raise InputError(
                f"{directory}: {_LM_HEAD} differs from {_SHARED} although config.json "
                "ties them: if this is a T5 1.1, set tie_word_embeddings (and "
                "scale_decoder_outputs, if there) to false"
            )
    elif values.get("tie_word_embeddings") and embedding is not None:
        # Tied but not rescaled, which T5X does not know: two layers of equal weights.
        tensors.setdefault(_LM_HEAD, embedding)
    return dataclasses.replace(config, logits_via_embedding=rescales)


def _merge_aliases(tensors: dict[str, np.ndarray], directory: Path) -> None:
    """Leaves the embedding under one name; old checkpoints hold it three times."""
    copies = {name: tensors.pop(name) for name in _ALIASES if name in tensors}
    for name, tensor in copies.items():
        if not _same(tensors.setdefault(_SHARED, tensor), tensor):
            raise InputError(
                f"{directory}: {name} differs from {_SHARED}: give a T5 with one embedding"
            )


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    # NaN equals NaN here: check_finite reports it better.
    return first is second or np.array_equal(first, second, equal_nan=True)


# --- weights -----------------------------------------------------------------


def _to_params(tensors: dict[str, np.ndarray], config: T5Config, source: str) -> Any:
    """Our tree of the tensors, which are checked and then consumed."""
    names = tensor_names(config)
    expected = {}
    for path, shape in expected_shapes(config).items():
        name, transposed = names[path]
        expected[name] = shape[::-1] if transposed else shape
    found = {name: tensor.shape for name, tensor in tensors.items()}
    check_shapes(found, expected, source)
    check_finite(tensors, source)
    flat = {}
    for path, (name, transposed) in names.items():
        tensor = tensors.pop(name)
        flat[path] = np.ascontiguousarray(tensor.T) if transposed else tensor
    return unflatten_dict(flat, sep="/")


def _read_tensors(directory: Path, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Every stored tensor, as ``dtype``, one at a time."""
    for path in _weight_files(directory):
        read = _read_safetensors if path.suffix == ".safetensors" else _read_torch
        with _damage_named(path):
            for name, tensor in read(path):
                if not jnp.issubdtype(tensor.dtype, jnp.floating):
                    raise InputError(
                        f"{path}: {name} is {tensor.dtype}: give float32, float16 or "
                        "bfloat16 weights"
                    )
                yield name, tensor.astype(jnp.dtype(dtype), copy=False)


def _weight_files(directory: Path) -> list[Path]:
    present = [directory / name for name in _WEIGHTS if (directory / name).is_file()]
    if not present:
        raise InputError(
            f"{directory} holds no weights: copy model.safetensors or "
            "pytorch_model.bin, or the shards and their index, there"
        )
    if present[0].suffix != ".json":
        return present[:1]
    weight_map = read_json(present[0]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{present[0]} has no weight_map: copy the file again")
    shards = [directory / name for name in sorted(set(map(str, weight_map.values())))]
    for shard in shards:
        if not shard.is_file():
            raise InputError(f"no file {shard}, which {present[0].name} lists: copy it there")
    return shards


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # safetensors, pickle and zipfile raise assorted types
        raise InputError(
            f"cannot read the weights in {path} ({one_line(error)}): copy the file again"
        ) from error


def _read_safetensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118, it is not a dict
            yield name, file.get_tensor(name)


def _read_torch(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path} needs PyTorch to be read: pip install torch, or convert it to "
            "model.safetensors"
        ) from error
    # weights_only: a pickle from elsewhere must not run code.
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, tensor in state.items():
        # numpy has no bfloat16 that torch could hand over; float32 holds it exactly.
        is_bfloat16 = tensor.dtype == torch.bfloat16
        yield name, (tensor.float() if is_bfloat16 else tensor).numpy()


# --- vocabulary --------------------------------------------------------------


def read_vocabulary(values: dict[str, Any], directory: Path) -> Vocabulary:
    """The vocabulary of a checkpoint whose config.json holds ``values``.

    Raises:
        InputError: there is none, or one that is not T5's kind.
    """
    tokenizer_path = directory / "tokenizer_config.json"
    tokenizer = read_json(tokenizer_path) if tokenizer_path.is_file() else {}
    vocabulary = _base_vocabulary(values, tokenizer, directory)
    _check_added_tokens(tokenizer, vocabulary, directory)
    return vocabulary


def _base_vocabulary(
    values: dict[str, Any], tokenizer: dict[str, Any], directory: Path
) -> Vocabulary:
    spiece = directory / SPIECE_NAME
    extra_ids = tokenizer.get("extra_ids")
    if str(tokenizer.get("tokenizer_class", "")).startswith("ByT5"):
        return ByteVocabulary(125 if extra_ids is None else extra_ids)
    if spiece.is_file():
        # mT5's file holds its sentinels already, T5's does not.
        default = 0 if values["model_type"] == "mt5" else 100
        return SentencePieceVocabulary(spiece, default if extra_ids is None else extra_ids)
    if (directory / "tokenizer.json").is_file():
        raise InputError(
            f"{directory} has tokenizer.json but no {SPIECE_NAME}: copy {SPIECE_NAME} "
            "there from the model it was fine-tuned from"
        )
    if values.get("vocab_size") == ByteVocabulary().vocab_size:
        return ByteVocabulary()
    raise InputError(f"no vocabulary at {spiece}: copy {SPIECE_NAME} there")


def _check_added_tokens(tokenizer: dict[str, Any], vocabulary: Vocabulary, directory: Path) -> None:
    """Refuses tokens that exist in the tokenizer alone: their text would be lost."""
    decoder = tokenizer.get("added_tokens_decoder") or {}
    added = {int(i): token.get("content") for i, token in decoder.items()}
    added_path = directory / "added_tokens.json"
    if added_path.is_file():
        added |= {int(i): token for token, i in read_json(added_path).items()}
    foreign = sorted(i for i in added if i >= vocabulary.vocab_size)
    if foreign:
        raise InputError(
            f"{directory} adds token {added[foreign[0]]!r} with id {foreign[0]} to "
            f"the {vocabulary.vocab_size} of its vocabulary: give a model without "
            "added tokens"
        )


def _tokenizer_values(vocabulary: Vocabulary) -> dict[str, Any]:
    is_bytes = isinstance(vocabulary, ByteVocabulary)
    return {
        "tokenizer_class": "ByT5Tokenizer" if is_bytes else "T5Tokenizer",
        "extra_ids": vocabulary.extra_ids,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
