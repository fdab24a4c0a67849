"""Drafts that share their target's encoder and embedding, on disk: only what is their own.

config.json          format, version, the draft's sizes, the layers of the target that
                     its own were, the target's marks, stored type
draft.safetensors    the decoder, by our names, without the maps to keys and values of
                     the source
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x.checkpoints.loading import find_directory
from spec_t5x.checkpoints.own.directory import (
    check_belongs,
    check_format,
    read_arrays,
    write_target_draft,
)
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing, read_json
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.checkpoints.storage.validate import check_finite, check_tensors
from spec_t5x.models.binding import abstract_params
from spec_t5x.models.kept_layers import own_params
from spec_t5x.models.narrow_head import NarrowHead
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import PyTree

FORMAT = "spec_t5x_shared_draft"
VERSION = 1
WEIGHTS_NAME = "draft.safetensors"
_IDS = "narrow_head/ids"
# Of a draft's sizes, what need not be the target's.
_OF_DRAFTS = ("num_decoder_layers", "dropout_rate", "dtype")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedSharedDraft:
    """What is a draft's own, read from disk and checked against its target."""

    # ``models.kept_layers.own_params``, of the type that the target was loaded as.
    params: PyTree
    # ``config.dtype`` is the target's.
    config: T5Config
    # Which decoder layer of the target's each of the draft's was.
    layers: tuple[int, ...]
    # Of a narrow output layer; None where all tokens are known.
    head: NarrowHead | None


def save_shared_draft(
    directory: str | Path,
    params: PyTree,
    config: T5Config,
    layers: Sequence[int],
    target: LoadedModel,
    *,
    head: NarrowHead | None = None,
    dtype: str = "bfloat16",
    extra: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a draft, completely or not at all.

    Args:
        directory: where; its parents are made.
        params: the draft's own (``models.kept_layers.own_params``; with a head,
            ``models.narrow_head.narrowed_params``).
        config: the draft's sizes.
        layers: which decoder layer of the target's each of the draft's was.
        target: the model it was trained for.
        head: which tokens its narrow output layer knows.
        dtype: "bfloat16" or "float32", of the stored weights.
        extra: more entries for config.json (training steps, scores, ...).
        overwrite: whether an earlier checkpoint may be replaced.

    Raises:
        InputError: the directory is taken, the parameters do not fit the sizes or are not
            finite, or an argument is none of the above.
    """
    flat = flatten_dict(params, sep="/")
    num_known = None if head is None else head.ids.shape[0]
    _check_params(flat, config, num_known, f"parameters for {directory}")
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "draft": config.to_dict(),
        "layers": list(layers),
        "tokens_known": num_known,
    }
    ids = None if head is None else {_IDS: np.asarray(head.ids, np.int32)}
    options = {"dtype": dtype, "exact": ids, "extra": extra, "overwrite": overwrite}
    write_target_draft(directory, metadata, WEIGHTS_NAME, flat, target, **options)


def load_shared_draft(directory_or_name: str | Path, target: LoadedModel) -> LoadedSharedDraft:
    """Reads a draft that ``save_shared_draft`` wrote, for the target that it belongs to.

    Args:
        directory_or_name: a directory, or the name of one that ships with the package.
        target: the model that will verify it.

    Raises:
        InputError: the directory holds no such draft or a damaged one, or it is for
            another target.
    """
    directory = find_directory(directory_or_name)
    metadata = read_json(directory / CONFIG_NAME)
    path = directory / CONFIG_NAME
    remedy = "give a draft that spec-t5x distill wrote for a shared encoder"
    check_format(metadata, path, FORMAT, VERSION, remedy)
    with describing(path, "draft under 'draft' and 'layers'"):
        config = T5Config.from_dict(metadata["draft"])
        layers, num_known = tuple(map(int, metadata["layers"])), metadata["tokens_known"]
        num_known = None if num_known is None else int(num_known)
    sizes = {
        field.name: (getattr(config, field.name), getattr(target.config, field.name, None))
        for field in dataclasses.fields(T5Config)
        if field.name not in _OF_DRAFTS
    }
    check_belongs("draft layers", directory, metadata, target, sizes)
    flat = read_arrays(directory / WEIGHTS_NAME)
    ids = flat.pop(_IDS, None)
    _check_params(flat, config, num_known, str(directory / WEIGHTS_NAME))
    head = None if ids is None else NarrowHead.create(ids.astype(np.int32), config.vocab_size)
    dtype = target.config.dtype
    flat = {name: jnp.asarray(leaf, jnp.dtype(dtype)) for name, leaf in flat.items()}
    return LoadedSharedDraft(
        params=unflatten_dict(flat, sep="/"),
        config=dataclasses.replace(config, dtype=dtype),
        layers=layers,
        head=head,
    )


def _check_params(
    flat: dict[str, Any], config: T5Config, num_known: int | None, source: str
) -> None:
    own = own_params(abstract_params(config))
    if num_known is not None:
        own["decoder"].pop("logits_dense", None)
        kernel = jax.ShapeDtypeStruct((config.emb_dim, num_known), jnp.float32)
        own["narrow_head"] = {"kernel": kernel}
    expected = {name: leaf.shape for name, leaf in flatten_dict(own, sep="/").items()}
    check_tensors(flat, expected, source)
    check_finite(flat, source)
