"""Checkpoints of drafts that share parameters with their target, which are not stored.

    config.json          format, version, sizes, the target's marks, stored type
    draft.safetensors    the decoder without the maps to keys and values of the source, which the
                         target computes; of an EAGLE head also the maps of its inputs

The *marks* of a target are the fingerprints of its vocabulary and of its decoder, by which loading
refuses a draft of another target. Layers are counted from 0.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from spec_t5x.checkpoints.loading import find_directory
from spec_t5x.checkpoints.native.directory import DraftFormat, check_format, read_arrays
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing, read_json
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.checkpoints.storage.tensors import array_tensors, check_tensors, read_params
from spec_t5x.drafts.eagle import EagleDraft
from spec_t5x.drafts.kinds import DraftKind, Request
from spec_t5x.drafts.shared_encoder import SharedEncoderDraft
from spec_t5x.errors import InputError
from spec_t5x.loops.arguments import is_known
from spec_t5x.models.binding import abstract_params
from spec_t5x.models.eagle import EagleConfig
from spec_t5x.models.narrow_head import NarrowHead
from spec_t5x.models.shared_params import own_params
from spec_t5x.models.t5 import T5Config
from spec_t5x.models.weights import BITS
from spec_t5x.names import AUTO
from spec_t5x.types import PyTree

# Path of the parameter by which a draft recognizes its target, the decoder's last norm.
MARK = "decoder/decoder_norm/scale"
# Name of the array with the tokens of a narrow output layer.
IDS = "narrow_head/ids"
# Fields of a configuration that may differ from the target's; the second line for heads alone.
_OF_DRAFTS = ("num_decoder_layers", "dropout_rate", "dtype")
_OF_HEADS = ("emb_dim", "mlp_dim", "logits_via_embedding")

_FILE = "draft.safetensors"
SHARED = DraftFormat("spec_t5x_shared_draft", _FILE, "a draft that spec-t5x distill")
EAGLE = DraftFormat("spec_t5x_eagle", _FILE, "a head that spec-t5x distill, with unrolled_steps,")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedSharedDraft:
    """A draft without its target's parameters, read from disk and checked against the target."""

    # Parameters that are not the target's (``models.shared_params.own_params``), in its dtype.
    params: PyTree
    # ``config.dtype`` is the target's.
    config: T5Config
    # For each layer of the draft, the target's decoder layer whose source keys/values it reads.
    layers: tuple[int, ...]
    # Tokens that a narrow output layer scores; None if the output layer scores all tokens.
    head: NarrowHead | None


def load_shared_draft(
    directory_or_name: str | Path, target: LoadedModel, kind: DraftFormat = SHARED
) -> LoadedSharedDraft:
    """Reads a draft of ``kind``; raises ``InputError`` if it is damaged or of another target."""
    directory, config, layers, shapes = _open(directory_or_name, target, kind)
    flat = read_arrays(directory / kind.file)
    ids, dtype = flat.pop(IDS, None), target.config.dtype
    return LoadedSharedDraft(
        params=checked_params(flat, shapes, directory, dtype),
        config=dataclasses.replace(config, dtype=dtype),
        layers=layers,
        head=None if ids is None else NarrowHead.create(ids.astype(np.int32), config.vocab_size),
    )


def _open(
    directory_or_name: str | Path, target: LoadedModel, kind: DraftFormat
) -> tuple[Path, T5Config, tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Returns a draft's directory, sizes, layers and parameters' shapes, which are checked."""
    directory, metadata = read_config(directory_or_name, kind)
    is_head = kind == EAGLE
    with describing(directory / CONFIG_NAME, "draft under 'draft' and 'layers'"):
        config = (EagleConfig if is_head else T5Config).from_dict(metadata["draft"])
        layers, num_known = tuple(map(int, metadata["layers"])), metadata["tokens_known"]
        num_known = None if num_known is None else int(num_known)
        shapes = shapes_of_layers(config, num_known)
    sizes = {
        field.name: (getattr(config, field.name), getattr(target.config, field.name, None))
        for field in dataclasses.fields(T5Config)
        if field.name not in _OF_DRAFTS + _OF_HEADS * is_head
    }
    if is_head:
        sizes["target_dim"] = (config.target_dim, target.config.emb_dim)
    check_belongs("draft layers", directory, metadata, target, sizes)
    return directory, config, layers, shapes


def target_fingerprint(target: LoadedModel) -> str:
    """Returns a hash (hex) that differs between trained targets, but not with the loaded dtype.

    The hash covers the scale of the decoder's last norm, which all training changes, in bfloat16,
    the coarsest type that models are stored and loaded in.
    """
    scale = np.asarray(target.params["decoder"]["decoder_norm"]["scale"])
    return hashlib.sha256(scale.astype(jnp.bfloat16).tobytes()).hexdigest()


def read_config(directory_or_name: str | Path, kind: DraftFormat) -> tuple[Path, dict[str, Any]]:
    """Returns a draft's directory and config.json; raises ``InputError`` if not of ``kind``."""
    directory = find_directory(directory_or_name)
    path = directory / CONFIG_NAME
    metadata = read_json(path)
    check_format(metadata, path, kind.name, kind.version, f"give {kind.made_by} wrote")
    return directory, metadata


def checked_params(
    arrays: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    directory: Path,
    dtype: str,
) -> PyTree:
    """Returns a tree in ``dtype``; raises ``InputError`` unless shapes fit and all is finite."""
    tensors = array_tensors(arrays)
    check_tensors(tensors, shapes, str(directory))
    return read_params(tensors, str(directory), dtype=dtype)


def shapes_of_layers(config: T5Config, num_known: int | None) -> dict[str, tuple[int, ...]]:
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
    """Raises ``InputError`` if marks or ``sizes`` (the draft's, the target's) differ.

    The decoder's mark is compared only if the target's parameters are there, with values.
    """
    marks = metadata.get("target")
    marks = marks if isinstance(marks, dict) else {}
    pairs = sizes | {"vocabulary": (marks.get("vocabulary"), target.vocabulary.fingerprint())}
    if target.params and is_known(target.params["decoder"]["decoder_norm"]["scale"]):
        pairs["decoder"] = (marks.get("fingerprint"), target_fingerprint(target))
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise InputError(
                f"{what} {directory} are for {name} {str(ours)[:12]} and target "
                f"{target.directory} has {str(theirs)[:12]}: give {what} that were trained for "
                "this target"
            )


def _of_format(kind: DraftFormat, draft: type[SharedEncoderDraft], name: str) -> DraftKind:
    def make(request: Request, argument: str) -> SharedEncoderDraft:
        loaded = load_shared_draft(argument, request.target, kind)
        own, weights = (loaded.params, loaded.config, loaded.layers), request.options.weights
        settings = request.options.settings
        made = draft.create(*own, request.model, settings=settings, head=loaded.head)
        return made if weights == AUTO else made.replace(model=made.model.rounded(BITS[weights]))

    return DraftKind(
        make=make,
        draft=draft,
        open=lambda argument, target: _open(argument, target, kind),
        format=kind.name,
        has_checkpoint=True,
        packaged=name,
        needs_encoder=True,
        has_temperature=True,
        has_weights=True,
    )


SHARED_KIND = _of_format(SHARED, SharedEncoderDraft, "shared_encoder")
EAGLE_KIND = _of_format(EAGLE, EagleDraft, "eagle")
