"""Opening a T5X checkpoint, of its legacy format or its Orbax one, without T5X.

T5X keeps a model's configuration in gin files, apart from the checkpoint. The shapes of the
parameters determine all of it but the activation of the feed-forward layers, which is T5's own:
ReLU in 1.0 (``wi``), gated GELU in 1.1, Flan, mT5 and ByT5 (``wi_0`` and ``wi_1``), and the
largest relative distance, 128.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.own import native
from spec_t5x.checkpoints.storage.files import read_json
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensorstore_arrays import open_tensors
from spec_t5x.checkpoints.storage.validate import check_vocabulary_fits, compress
from spec_t5x.checkpoints.storage.vocabularies import (
    VocabularyLike,
    choose_vocabulary,
    make_vocabulary,
)
from spec_t5x.checkpoints.storage.weights import Tensor, Weights
from spec_t5x.checkpoints.t5x.index import T5XIndex, find_t5x, read_index
from spec_t5x.data.vocabulary import SPIECE_NAME, Vocabulary
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config

# Beside T5X's files, which it does not read: the config.json of our own format. With it a
# checkpoint that ``save_t5x`` wrote needs neither inference nor vocabulary.
SIDECAR_NAME = "spec_t5x.json"

_COPY_AGAIN = "copy the whole checkpoint again"

_EMBEDDING = "token_embedder/embedding"
_LOGITS = "decoder/logits_dense/kernel"
_LAYER = re.compile(r"(encoder|decoder)/layers_(\d+)/")


def recognizes(values: dict[str, Any] | None) -> bool:
    """See ``stored_model.Format``: T5X writes no config.json."""
    return values is None


def open_model(
    location: Location,
    values: None = None,
    *,
    vocabulary: VocabularyLike | None = None,
    config: T5Config | None = None,
) -> StoredModel:
    """Opens a checkpoint that T5X or ``save_t5x`` wrote (T5 1.0, 1.1, Flan, mT5, ByT5).

    Args:
        location: a checkpoint's directory (``…/checkpoint_1000000``), or a model's with
            such directories, of which the latest is taken; on this machine or in a bucket.
        values: None; see ``stored_model.Format``.
        vocabulary: what the checkpoint was trained with (see ``vocabularies``). T5X's
            hold none; without it ``spiece.model`` is looked for, in the directory and in
            the one above, and if there is none the model is opened without one.
        config: the network; by default inferred from the shapes of the parameters.

    Raises:
        InputError: there is no such checkpoint, it is damaged, or of another network.
    """
    found = find_t5x(location)
    if found is None:
        raise InputError(
            f"{location} holds no T5X checkpoint: give a directory such as …/checkpoint_1000000"
        )
    index = read_index(found)
    directory = found.parent if found.name == "state" else found
    tensors = open_tensors(index.entries, str(directory))
    sidecar = _read_sidecar(directory)
    if config is None and sidecar:
        config = native.read_config(sidecar, directory / SIDECAR_NAME)
    config = config or _infer_config(index, tensors, str(directory))
    chosen = _vocabulary(directory, sidecar, vocabulary, config.vocab_size)
    if chosen is not None:
        check_vocabulary_fits(chosen, config, str(directory))
    own = {"format": index.format, "version": index.version, "step": _read_step(index)}
    return StoredModel(
        weights=Weights(source=str(directory), tensors=tensors, remedy=_COPY_AGAIN),
        config=config,
        vocabulary=chosen,
        directory=directory,
        metadata={**native.extra_entries(sidecar or {}), **own},
    )


def has_vocabulary(location: Location, values: None = None) -> bool:
    """See ``stored_model.Format``."""
    return open_model(location, values).vocabulary is not None


def read_vocabulary(location: Location, values: None = None) -> Vocabulary:
    """See ``stored_model.Format``."""
    return open_model(location, values).known_vocabulary()


def _read_sidecar(directory: Location) -> dict[str, Any] | None:
    path = directory / SIDECAR_NAME
    return read_json(path) if path.is_file() else None


def _infer_config(index: T5XIndex, tensors: Mapping[str, Tensor], source: str) -> T5Config:
    absent = [path for path in index.entries if path not in tensors]
    if len(absent) == len(index.entries):
        raise InputError(
            f"{source}: none of the {len(absent)} arrays that it lists is there: {_COPY_AGAIN}"
        )
    shapes = {path: entry.shape for path, entry in index.entries.items() if entry.shape is not None}
    shapes |= {path: tensor.shape for path, tensor in tensors.items() if path not in shapes}
    try:
        return infer_config(shapes, source)
    except InputError as error:
        if not absent:
            raise
        raise InputError(
            f"{source}: {len(absent)} of {len(index.entries)} arrays are not there "
            f"({', '.join(compress(absent))}): {_COPY_AGAIN}"
        ) from error


def _vocabulary(
    directory: Location,
    sidecar: dict[str, Any] | None,
    given: VocabularyLike | None,
    num_rows: int,
) -> Vocabulary | None:
    if sidecar and sidecar.get("vocabulary") is not None:
        own = native.read_vocabulary(directory, sidecar)
        return choose_vocabulary(given, own, directory, num_rows)
    if given is None and isinstance(directory, Path):
        # Resolved: the directory above "." is its parent.
        places = (directory, directory.resolve().parent)
        given = next((p / SPIECE_NAME for p in places if (p / SPIECE_NAME).is_file()), None)
    return None if given is None else make_vocabulary(given, num_rows)


def _read_step(index: T5XIndex) -> int | None:
    entries = {"step": index.step} if index.step else {}
    tensors = open_tensors(entries, str(index.location))
    return int(tensors["step"].read(())) if tensors else None


def infer_config(shapes: Mapping[str, tuple[int, ...]], source: str) -> T5Config:
    """The T5 that has parameters of these shapes.

    Args:
        shapes: by path, such as ``decoder/layers_0/mlp/wo/kernel``.
        source: where they come from; messages begin with it.

    Raises:
        InputError: they are of another network, or too few to determine it.
    """
    _refuse_other_networks(shapes, source)
    bias = "encoder/relpos_bias/rel_embedding"
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
    )


def _refuse_other_networks(shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    remedy = "give an encoder-decoder of t5x/examples/t5 (T5, Flan, mT5, ByT5)"
    paths = list(shapes)
    if any(path.startswith(("encoder/encoder/", "decoder/decoder/")) for path in paths):
        raise InputError(
            f"{source} is of scalable_t5: its layers are scanned (scan_layers), each with a "
            f"relative bias of its own, which T5 has not: {remedy}"
        )
    if any(_LAYER.match(path) and "/relpos_bias/" in path for path in paths):
        raise InputError(f"{source} has a relative bias in every layer, as umT5: {remedy}")
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
