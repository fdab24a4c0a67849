"""Format of the gemma library's T5Gemmas: Orbax checkpoints without a configuration.

    encoder/embedder/input_embedding          [vocab, embed]; the decoder has another
    encoder/layer_0/attn/qkv_einsum/w         [3, heads, embed, head_dim], or, if queries share
      …/q_einsum/w, …/kv_einsum/w             keys, [heads, …] and [2, kv_heads, …]
      …/attn_vec_einsum/w                     [heads, head_dim, embed]
    encoder/layer_0/mlp/gating_einsum         [2, embed, mlp] or [2, mlp, embed]
    encoder/layer_0/mlp/linear                [mlp, embed]

Older files join the first keys of a path to one. The shapes determine the sizes; other settings and
the special ids are the same in every published T5Gemma. "Our" names are those of ``network``.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from spec_t5x.checkpoints.formats import Format
from spec_t5x.checkpoints.huggingface import t5
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensors import Tensor
from spec_t5x.checkpoints.storage.tensorstore_arrays import (
    METADATA_NAME,
    open_tensors,
    orbax_entries,
)
from spec_t5x.contrib.t5gemma.network import T5GemmaConfig
from spec_t5x.errors import InputError

# The special ids of every published T5Gemma.
_IDS = {t5.START: 2, t5.EOS: 1, t5.PAD: 0}

_STACK = re.compile(r"(?:^|.*/)((?:encoder|decoder)/.*?)(?:/w)?$")
_LAYER = re.compile(r"(encoder|decoder)/layer_(\d+)/(\w+)/(\w+)")
_OUTSIDE = {
    "decoder/embedder/input_embedding": "token_embedder/embedding",
    "encoder/embedder/input_embedding": "source_embedder/embedding",
    "decoder/final_norm/scale": "decoder/decoder_norm/scale",
    "encoder/final_norm/scale": "encoder/encoder_norm/scale",
}
# Our modules of a decoder's layer, by theirs; names of an encoder's lack "self_".
_MODULES = {
    "pre_attention_norm": "pre_self_attention_layer_norm",
    "attn": "self_attention",
    "post_attention_norm": "post_self_attention_layer_norm",
    "pre_cross_attention_norm": "pre_cross_attention_layer_norm",
    "cross_attn": "encoder_decoder_attention",
    "post_cross_attention_norm": "post_cross_attention_layer_norm",
    "pre_ffw_norm": "pre_mlp_layer_norm",
    "mlp": "mlp",
    "post_ffw_norm": "post_mlp_layer_norm",
}
# Our maps, by the tensor of theirs that stacks them.
_JOINED = {
    "q_einsum": ("query",),
    "kv_einsum": ("key", "value"),
    "qkv_einsum": ("query", "key", "value"),
    "attn_vec_einsum": ("out",),
    "gating_einsum": ("wi_0", "wi_1"),
    "linear": ("wo",),
}


def is_gemma(location: Location) -> bool:
    """Returns True if the directory is an Orbax checkpoint with the gemma library's names."""
    path = location / METADATA_NAME
    return path.is_file() and b"input_embedding" in path.read_bytes()


def open_model(location: Location, values: None = None) -> StoredModel:
    """Opens a checkpoint of the gemma library; ``values`` is None, as there is no config.json."""
    entries = {"/".join(keys): entry for keys, entry in orbax_entries(location).items()}
    theirs = {}
    for path, tensor in open_tensors(entries, str(location)).items():
        match = _STACK.match(path)
        theirs[match[1] if match else path] = tensor
    config = _infer_config(theirs, str(location))
    tensors = {}
    for path, tensor in theirs.items():
        tensors |= _ours(path, tensor, config)
    tables = [path for path in tensors if path.endswith("/embedding")]
    tensors, config = t5.renumbered_model(tensors, config, _IDS, tables)
    return StoredModel(
        tensors=tensors,
        config=config,
        vocabulary=None,
        directory=location,
        metadata={t5.PAD: _IDS[t5.PAD]},
    )


def _infer_config(tensors: dict[str, Tensor], source: str) -> T5GemmaConfig:
    """Returns the configuration whose parameters have the tensors' shapes."""

    def shape(path: str) -> tuple[int, ...]:
        if path not in tensors:
            raise InputError(
                f"{source} lacks {path}, which determines the configuration: give a complete "
                "T5Gemma of the gemma library"
            )
        return tensors[path].shape

    def sizes(stack: str) -> dict[str, int]:
        attention = f"{stack}/layer_0/attn"
        num_heads, head_dim, emb_dim = shape(f"{attention}/attn_vec_einsum")
        shared = f"{attention}/kv_einsum"
        return {
            "emb_dim": emb_dim,
            "num_heads": num_heads,
            "num_kv_heads": shape(shared)[1] if shared in tensors else num_heads,
            "head_dim": head_dim,
            "query_scalar": head_dim,
            "mlp_dim": shape(f"{stack}/layer_0/mlp/linear")[0],
        }

    def num_layers(stack: str) -> int:
        matches = filter(None, map(_LAYER.fullmatch, tensors))
        return 1 + max(int(match[2]) for match in matches if match[1] == stack)

    decoder, encoder = sizes("decoder"), sizes("encoder")
    return T5GemmaConfig(
        **decoder,
        **{f"encoder_{name}": number for name, number in encoder.items()},
        vocab_size=shape("decoder/embedder/input_embedding")[0],
        num_encoder_layers=num_layers("encoder"),
        num_decoder_layers=num_layers("decoder"),
    )


def _ours(path: str, tensor: Tensor, config: T5GemmaConfig) -> dict[str, Tensor]:
    """Splits a tensor into our parameters by path; an unknown path is kept for a later error."""
    if path in _OUTSIDE:
        return {_OUTSIDE[path]: tensor}
    match = _LAYER.fullmatch(path)
    if match is None or match[3] not in _MODULES:
        return {path: tensor}
    stack, number, module, name = match.groups()
    ours = _MODULES[module] if stack == "decoder" else _MODULES[module].replace("self_", "")
    if name == "scale":
        return {f"{stack}/layers_{number}/{ours}/scale": tensor}
    emb_dim = (config if stack == "decoder" else config.of_encoder).emb_dim
    converted = {
        map_: _derived(tensor, functools.partial(_map, name, i, emb_dim))
        for i, map_ in enumerate(_JOINED.get(name, ()))
    }
    named = {f"{stack}/layers_{number}/{ours}/{map_}/kernel": m for map_, m in converted.items()}
    return named or {path: tensor}


def _map(name: str, index: int, emb_dim: int, whole: np.ndarray) -> np.ndarray:
    """Returns map ``index`` of ``_JOINED[name]`` as a matrix ``[inner, features]``."""
    if name == "linear":
        return whole
    if name == "attn_vec_einsum":
        return whole.reshape(-1, whole.shape[-1])
    if name == "gating_einsum":
        return whole[index] if whole.shape[1] == emb_dim else whole[index].T
    # ``[heads, embed, head_dim]`` to ``[embed, heads * head_dim]``.
    heads = whole if name == "q_einsum" else whole[index]
    return heads.transpose(1, 0, 2).reshape(heads.shape[1], -1)


def _derived(tensor: Tensor, function: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    """Returns ``function`` of a tensor, lazily; reading any slice reads the whole tensor."""
    everything = tuple(slice(0, length) for length in tensor.shape)
    # A broadcast array, which takes no memory, gives the result's shape.
    shape = function(np.broadcast_to(np.float32(0), tensor.shape)).shape

    def read(index: Any) -> np.ndarray:
        return np.ascontiguousarray(function(tensor.read(everything))[index])

    return dataclasses.replace(tensor, shape=shape, read=read)


FORMAT = Format(
    recognizes=lambda directory, values: values is None and is_gemma(directory),
    open_model=open_model,
    config=T5GemmaConfig,
)
