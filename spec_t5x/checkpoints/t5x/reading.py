"""Opening a T5X checkpoint, of its legacy format or its Orbax one, without T5X.

T5X keeps a model's configuration in gin files, apart from the checkpoint. The shapes of the
parameters determine all of it but the activation of the feed-forward layers, which is T5's own:
ReLU in 1.0 (``wi``), gated GELU in 1.1, Flan, mT5, umT5 and ByT5 (``wi_0`` and ``wi_1``), and the
largest relative distance, 128.
"""

import re
from collections.abc import Mapping

from spec_t5x.checkpoints.native import model_files
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, SIDECAR_NAME, read_json
from spec_t5x.checkpoints.storage.locations import LOG_IN, GcsPath, Location
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensorstore_arrays import open_tensors
from spec_t5x.checkpoints.t5x.index import find_t5x, read_index
from spec_t5x.checkpoints.t5x.scanned import ours
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config

_EMBEDDING = "token_embedder/embedding"
_LOGITS = "decoder/logits_dense/kernel"
_LAYER = re.compile(r"(encoder|decoder)/layers_(\d+)/")


def open_model(location: Location, values: None = None) -> StoredModel:
    """Opens a checkpoint that T5X or ``writing`` wrote (T5 1.0, 1.1, Flan, mT5, umT5, ByT5).

    Args:
        location: a checkpoint's directory (``…/checkpoint_1000000``), or a model's with
            such directories, of which the latest is taken; on this machine or in a bucket.
        values: None; see ``formats``.
    """
    found = find_t5x(location)
    if found is None:
        remedy = "give a spec_t5x, Hugging Face or T5X checkpoint"
        if isinstance(location, GcsPath):
            remedy = f"check the name and the credentials ({LOG_IN})"
        raise InputError(f"{location} holds no {CONFIG_NAME} and no T5X checkpoint: {remedy}")
    entries, step = read_index(found)
    directory = found.parent if found.name == "state" else found
    tensors = ours(open_tensors(entries, str(directory)), str(directory))
    path, vocabulary = directory / SIDECAR_NAME, None
    # With it a checkpoint that ``writing`` wrote needs neither inference nor vocabulary.
    sidecar = read_json(path) if path.is_file() else {}
    if sidecar.get("vocabulary") is not None:
        vocabulary = model_files.read_vocabulary(directory, sidecar)
    if sidecar:
        config = model_files.read_config(sidecar, path)
    else:
        shapes = {path: tensor.shape for path, tensor in tensors.items()}
        config = infer_config(shapes, str(directory))
    metadata = model_files.extra_entries(sidecar)
    if step is not None:
        metadata["step"] = int(open_tensors({"step": step}, str(found))["step"].read(()))
    return StoredModel(
        tensors=tensors,
        config=config,
        vocabulary=vocabulary,
        directory=directory,
        metadata=metadata,
    )


def infer_config(shapes: Mapping[str, tuple[int, ...]], source: str) -> T5Config:
    """The T5 that has parameters of these shapes.

    Args:
        shapes: by path, such as ``decoder/layers_0/mlp/wo/kernel``.
        source: where they come from; messages begin with it.
    """
    _refuse_other_networks(shapes, source)
    bias = "encoder/relpos_bias/rel_embedding"
    per_layer = bias not in shapes
    if per_layer:
        bias = "encoder/layers_0/relpos_bias/rel_embedding"
    vocab_size, emb_dim = _shape(shapes, _EMBEDDING, source)
    num_heads, num_buckets = _shape(shapes, bias, source)
    _, joined = _shape(shapes, "encoder/layers_0/attention/query/kernel", source)
    mlp_dim, _ = _shape(shapes, "encoder/layers_0/mlp/wo/kernel", source)
    if joined % num_heads:
        raise InputError(
            f"{source}: attention of width {joined} does not divide into the {num_heads} heads "
            f"of {bias}: give a T5 of t5x/examples/t5"
        )
    is_gated = "encoder/layers_0/mlp/wi_0/kernel" in shapes
    return T5Config(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=num_heads,
        head_dim=joined // num_heads,
        mlp_dim=mlp_dim,
        num_encoder_layers=_num_layers(shapes, "encoder"),
        num_decoder_layers=_num_layers(shapes, "decoder"),
        mlp_activations=("gelu", "linear") if is_gated else ("relu",),
        logits_via_embedding=_LOGITS not in shapes,
        relpos_num_buckets=num_buckets,
        relpos_per_layer=per_layer,
    )


def _refuse_other_networks(shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    remedy = "give an encoder-decoder of t5x/examples/t5 (T5, Flan, mT5, umT5, ByT5)"
    paths = list(shapes)
    if paths and not any(path.startswith("encoder/") for path in paths):
        raise InputError(f"{source} has no encoder: {remedy}")


def _shape(shapes: Mapping[str, tuple[int, ...]], path: str, source: str) -> tuple[int, int]:
    shape = shapes.get(path)
    if shape is None or len(shape) != 2:
        found = "is not there" if shape is None else f"is {list(shape)}, not a matrix"
        raise InputError(
            f"{source}: {path}, which determines the configuration, {found}: copy the whole "
            "checkpoint again"
        )
    return shape


def _num_layers(shapes: Mapping[str, tuple[int, ...]], stack: str) -> int:
    """One more than the highest number; a gap is reported with what else is missing."""
    matches = (_LAYER.match(path) for path in shapes)
    numbers = [int(match[2]) for match in matches if match and match[1] == stack]
    return max(numbers, default=0) + 1
