"""Drafts that build on their target's parameters, on disk: only their own parameters.

    config.json          format, version, sizes, the target's marks, stored type
    draft.safetensors    of a draft that shares the encoder: the decoder, by our names, without
                         the maps to keys and values of the source; of an EAGLE head, the
                         maps of its inputs, too

The *marks* of a target, by which its draft recognizes it, are the fingerprints of its
vocabulary and of its decoder.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from spec_t5x.checkpoints.loading import find_directory
from spec_t5x.checkpoints.native.directory import check_format, read_arrays, write_draft
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing, read_json
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.checkpoints.storage.tensors import (
    array_tensors,
    check_tensors,
    read_params,
    read_tensors,
)
from spec_t5x.drafts.eagle import EagleDraft
from spec_t5x.drafts.kinds import DraftKind, Request, one_checkpoint
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.errors import InputError, check_choice
from spec_t5x.models.binding import abstract_params
from spec_t5x.models.eagle import EagleConfig
from spec_t5x.models.kept_layers import own_params
from spec_t5x.models.narrow_head import NarrowHead
from spec_t5x.models.t5 import T5Config
from spec_t5x.models.weights import BITS
from spec_t5x.names import AUTO, STORED_DTYPES
from spec_t5x.types import PyTree

VERSION = 1
_IDS = "narrow_head/ids"
# Sizes of a draft that may differ from the target's, and further ones of a head.
_OF_DRAFTS = ("num_decoder_layers", "dropout_rate", "dtype")
_OF_HEADS = ("emb_dim", "mlp_dim", "logits_via_embedding")


@dataclasses.dataclass(frozen=True)
class DraftFormat:
    """A format of drafts that belong to one target."""

    # The "format" in config.json.
    name: str
    # The file with the arrays.
    file: str
    # The command that writes it, for messages.
    made_by: str


_FILE = "draft.safetensors"
SHARED = DraftFormat("spec_t5x_shared_draft", _FILE, "a draft that spec-t5x distill")
EAGLE = DraftFormat("spec_t5x_eagle", _FILE, "a head that spec-t5x distill, with unrolled_steps,")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedSharedDraft:
    """A draft's own parameters, read from disk and checked against its target."""

    # ``models.kept_layers.own_params``, of the target's type.
    params: PyTree
    # ``config.dtype`` is the target's.
    config: T5Config
    # The target's decoder layer that each of the draft's was.
    layers: tuple[int, ...]
    # A narrow output layer's tokens; None if all tokens are known.
    head: NarrowHead | None


def save_shared_draft(
    directory: str | Path,
    params: PyTree,
    config: T5Config,
    layers: Sequence[int],
    target: LoadedModel,
    *,
    head: NarrowHead | None = None,
    **options: Any,
) -> None:
    """Writes a draft that shares its target's encoder, completely or not at all.

    A draft of an ``EagleConfig`` has the format ``EAGLE``.

    Args:
        directory: the draft's.
        params: the draft's own (``models.kept_layers.own_params``; with a head,
            ``models.narrow_head.narrowed_params``).
        config: the draft's sizes.
        layers: the target's decoder layer that each of the draft's was.
        target: the model that the draft was trained for.
        head: the tokens of its narrow output layer.
        **options: ``dtype``, ``extra``, ``overwrite``, as of ``model_files.save_model``.
    """
    num_known = None if head is None else head.ids.shape[0]
    entries = {"draft": config.to_dict(), "layers": list(layers), "tokens_known": num_known}
    ids = {} if head is None else {_IDS: np.asarray(head.ids, np.int32)}
    kind = EAGLE if isinstance(config, EagleConfig) else SHARED
    shapes = _shapes_of_layers(config, num_known)
    write_for_target(directory, kind, entries, params, shapes, target, exact=ids, **options)


def load_shared_draft(
    directory_or_name: str | Path, target: LoadedModel, kind: DraftFormat = SHARED
) -> LoadedSharedDraft:
    """Reads a draft of ``kind`` (``SHARED``, ``EAGLE``) for the target that it belongs to."""
    directory, metadata = read_config(directory_or_name, kind)
    is_head = kind == EAGLE
    with describing(directory / CONFIG_NAME, "draft under 'draft' and 'layers'"):
        config = (EagleConfig if is_head else T5Config).from_dict(metadata["draft"])
        layers, num_known = tuple(map(int, metadata["layers"])), metadata["tokens_known"]
        num_known = None if num_known is None else int(num_known)
    sizes = {
        field.name: (getattr(config, field.name), getattr(target.config, field.name, None))
        for field in dataclasses.fields(T5Config)
        if field.name not in _OF_DRAFTS + _OF_HEADS * is_head
    }
    if is_head:
        sizes["target_dim"] = (config.target_dim, target.config.emb_dim)
    check_belongs("draft layers", directory, metadata, target, sizes)
    flat = read_arrays(directory / kind.file)
    ids, dtype = flat.pop(_IDS, None), target.config.dtype
    return LoadedSharedDraft(
        params=checked_params(flat, _shapes_of_layers(config, num_known), directory, dtype),
        config=dataclasses.replace(config, dtype=dtype),
        layers=layers,
        head=None if ids is None else NarrowHead.create(ids.astype(np.int32), config.vocab_size),
    )


def target_fingerprint(target: LoadedModel) -> str:
    """Computes a hash that tells trained targets apart, loaded as any type.

    It covers the scale of the decoder's last norm, which all training changes, in bfloat16, the
    coarsest type that models are stored and loaded in.
    """
    scale = np.asarray(target.params["decoder"]["decoder_norm"]["scale"])
    return hashlib.sha256(scale.astype(jnp.bfloat16).tobytes()).hexdigest()


def write_for_target(
    directory: str | Path,
    kind: DraftFormat,
    entries: dict[str, Any],
    params: PyTree,
    shapes: Mapping[str, tuple[int, ...]],
    target: LoadedModel,
    *,
    dtype: str = "bfloat16",
    exact: Mapping[str, np.ndarray] | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes parameters of these ``shapes``, stored as ``dtype``, and ``exact`` arrays as they are.

    ``entries`` are those of config.json beside the target's marks.
    """
    check_choice("stored dtype", dtype, STORED_DTYPES)
    metadata = {
        "format": kind.name,
        "version": VERSION,
        **entries,
        "target": {
            "vocabulary": target.vocabulary.fingerprint(),
            "fingerprint": target_fingerprint(target),
        },
        "stored_dtype": dtype,
    }
    tensors = array_tensors(params)
    check_tensors(tensors, shapes, str(directory))
    arrays = dict(read_tensors(tensors, str(directory), dtype)) | dict(exact or {})
    write_draft(directory, metadata, kind.file, arrays, extra=extra, overwrite=overwrite)


def read_config(directory_or_name: str | Path, kind: DraftFormat) -> tuple[Path, dict[str, Any]]:
    """Returns the directory, and its config.json, which has to be of this format."""
    directory = find_directory(directory_or_name)
    path = directory / CONFIG_NAME
    metadata = read_json(path)
    check_format(metadata, path, kind.name, VERSION, f"give {kind.made_by} wrote")
    return directory, metadata


def checked_params(
    arrays: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    directory: Path,
    dtype: str,
) -> PyTree:
    """Returns arrays by path as finite parameters of these shapes, as ``dtype``."""
    tensors = array_tensors(arrays)
    check_tensors(tensors, shapes, str(directory))
    return read_params(tensors, str(directory), dtype=dtype)


def _shapes_of_layers(config: T5Config, num_known: int | None) -> dict[str, tuple[int, ...]]:
    own = own_params(abstract_params(config))
    shapes = {path: leaf.shape for path, leaf in flatten_dict(own, sep="/").items()}
    if num_known is not None:
        shapes.pop("decoder/logits_dense/kernel", None)
        shapes["narrow_head/kernel"] = (config.emb_dim, num_known)
    return shapes


def check_belongs(
    what: str,
    directory: Path,
    metadata: dict[str, Any],
    target: LoadedModel,
    sizes: dict[str, tuple[int, int]],
) -> None:
    """Refuses a draft of another target, by its marks and by ``sizes`` (the draft's, the target's).

    The target's parameters are compared if they can be read: a program's trace has none.
    """
    marks = metadata.get("target")
    marks = marks if isinstance(marks, dict) else {}
    pairs = sizes | {"vocabulary": (marks.get("vocabulary"), target.vocabulary.fingerprint())}
    if _is_known(target.params["decoder"]["decoder_norm"]["scale"]):
        pairs["decoder"] = (marks.get("fingerprint"), target_fingerprint(target))
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise InputError(
                f"{what} {directory} are for {name} {str(ours)[:12]} and target "
                f"{target.directory} has {str(theirs)[:12]}: give {what} that were trained for "
                "this target"
            )


def _is_known(values: Any) -> bool:
    """Tells whether this process can read an array: no shape, not traced, not on other hosts."""
    if isinstance(values, jax.ShapeDtypeStruct | jax.core.Tracer):
        return False
    if isinstance(values, jax.Array):
        return values.is_fully_addressable or values.is_fully_replicated
    return True


def _of_format(kind: DraftFormat, draft: type[SharedEncoderDraft], name: str) -> DraftKind:
    def make(request: Request, argument: str) -> SharedEncoderDraft:
        loaded = load_shared_draft(argument or request.packaged(name), request.target, kind)
        own, weights = (loaded.params, loaded.config, loaded.layers), request.options.weights
        settings = request.options.settings
        made = draft.create(*own, request.model, settings=settings, head=loaded.head)
        return made if weights == AUTO else made.replace(model=made.model.rounded(BITS[weights]))

    return DraftKind(make=make, format=kind.name, checkpoints=one_checkpoint, needs_encoder=True)


SHARED_KIND = _of_format(SHARED, SharedEncoderDraft, "shared_encoder")
EAGLE_KIND = _of_format(EAGLE, EagleDraft, "eagle")
