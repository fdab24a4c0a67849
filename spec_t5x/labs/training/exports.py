"""Checkpoints that trainings write: models, and drafts of one target."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_t5x.checkpoints.native import ngram_tables, target_drafts
from spec_t5x.checkpoints.native.directory import DraftFormat, with_extra
from spec_t5x.checkpoints.native.model_files import write_model
from spec_t5x.checkpoints.storage.files import (
    CONFIG_NAME,
    save_arrays,
    staged_directory,
    write_json,
)
from spec_t5x.checkpoints.storage.stored_model import LoadedModel, StoredModel
from spec_t5x.checkpoints.storage.tensors import array_tensors, check_tensors, read_tensors
from spec_t5x.data.vocabulary import Vocabulary
from spec_t5x.drafts.ngram import NgramDraft
from spec_t5x.errors import InputError, check_choice
from spec_t5x.models.eagle import EagleConfig
from spec_t5x.models.narrow_head import NarrowHead
from spec_t5x.models.t5 import NetworkConfig, T5Config
from spec_t5x.names import STORED_DTYPES
from spec_t5x.types import Array, Int, Integer, PyTree


def save_model(
    directory: str | Path,
    params: PyTree,
    config: NetworkConfig,
    vocabulary: Vocabulary,
    *,
    dtype: str = "bfloat16",
    extra: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint, completely or not at all.

    Args:
        directory: directory of the checkpoint; missing parents are created.
        params: the network's parameters, as of ``LoadedModel``, without an outer "params".
        config: the network's configuration.
        vocabulary: the vocabulary, which is stored beside the parameters.
        dtype: type of the stored weights, "bfloat16" or "float32"; or "int8": a matrix takes a byte
            a weight, and is read back as bfloat16 (``rounded``).
        extra: further entries of config.json (training steps, scores, ...).
        overwrite: whether an earlier checkpoint may be replaced.

    Raises ``InputError`` if the directory is taken, the parameters do not fit ``config`` or are not
    finite, ``dtype`` is another, or ``extra`` has names of the format's entries.
    """
    stored = model_in_memory(directory, params, config, vocabulary, extra)
    stored.write(directory, write_model, dtype=dtype, overwrite=overwrite)


def model_in_memory(
    directory: str | Path,
    params: PyTree,
    config: NetworkConfig,
    vocabulary: Vocabulary | None,
    metadata: dict[str, Any] | None = None,
) -> StoredModel:
    """Returns parameters as a model that ``write`` stores; messages name ``directory``."""
    return StoredModel(
        tensors=array_tensors(params),
        config=config,
        vocabulary=vocabulary,
        directory=Path(directory),
        metadata=metadata or {},
    )


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

    The format is ``target_drafts.EAGLE`` if ``config`` is an ``EagleConfig``, else ``SHARED``.

    Args:
        directory: the directory to write.
        params: parameters that are not the target's (``models.shared_params.own_params``, or
            ``kept_layers.narrowed_params`` with ``head``).
        config: the draft's sizes.
        layers: for each layer of the draft, the target's decoder layer that it was made of.
        target: the model that the draft was trained for.
        head: tokens of a narrow output layer; None if the output layer scores all tokens.
        **options: ``dtype``, ``extra`` and ``overwrite`` of ``save_model``.
    """
    num_known = None if head is None else head.ids.shape[0]
    entries = {"draft": config.to_dict(), "layers": list(layers), "tokens_known": num_known}
    ids = {} if head is None else {target_drafts.IDS: np.asarray(head.ids, np.int32)}
    kind = target_drafts.EAGLE if isinstance(config, EagleConfig) else target_drafts.SHARED
    shapes = target_drafts.shapes_of_layers(config, num_known)
    write_for_target(directory, kind, entries, params, shapes, target, exact=ids, **options)


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
    """Writes a draft for ``target``: ``params`` stored as ``dtype``, ``exact`` arrays as they are.

    ``shapes`` are those that ``params`` must have, by path. config.json gets ``entries``, the
    target's marks, and ``extra``.
    """
    check_choice("stored dtype", dtype, STORED_DTYPES)
    entries = {
        **entries,
        "target": {
            "vocabulary": target.vocabulary.fingerprint(),
            "fingerprint": target_drafts.target_fingerprint(target),
        },
        "stored_dtype": dtype,
    }
    tensors = array_tensors(params)
    check_tensors(tensors, shapes, str(directory))
    arrays = dict(read_tensors(tensors, str(directory), dtype)) | dict(exact or {})
    _write_draft(directory, kind, entries, arrays, extra=extra, overwrite=overwrite)


def save_ngram(
    directory: str | Path,
    draft: NgramDraft,
    vocabulary: Vocabulary,
    *,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes n-gram tables and their vocabulary's fingerprint, completely or not at all.

    ``extra`` has further entries of config.json; ``overwrite`` allows to replace a directory.
    """
    if draft.vocab_size != vocabulary.vocab_size:
        raise InputError(
            f"the n-grams have {draft.vocab_size} tokens and the vocabulary "
            f"{vocabulary.vocab_size}: give the vocabulary that the texts were tokenised with"
        )
    entries = {
        "order": draft.order,
        "vocab_size": draft.vocab_size,
        "vocabulary": vocabulary.fingerprint(),
    }
    arrays = {"unigram": np.asarray(draft.unigram)}
    for order, level in enumerate(draft.levels, start=2):
        children, num_successors = _counts(level.first), _counts(level.starts)
        tables = (children, level.tokens, num_successors, level.successors, level.masses)
        for name, table in zip(ngram_tables.TABLES, tables, strict=True):
            arrays[f"{order}.{name}"] = np.asarray(table)
    options = {"extra": extra, "overwrite": overwrite}
    _write_draft(directory, ngram_tables.FORMAT, entries, arrays, **options)


def _counts(offsets: Int[Array, "owners_and_one"]) -> Integer[np.ndarray, "owners"]:
    """Returns the differences of offsets, as uint16 if they fit."""
    counts = np.diff(np.asarray(offsets))
    return counts.astype(np.uint16) if counts.max() <= np.iinfo(np.uint16).max else counts


def _write_draft(
    directory: str | Path,
    kind: DraftFormat,
    entries: dict[str, Any],
    arrays: Mapping[str, np.ndarray],
    *,
    extra: Mapping[str, Any] | None,
    overwrite: bool,
) -> None:
    """Writes config.json (``entries``, ``extra``) and arrays to ``kind.file``, all or nothing."""
    metadata = with_extra({"format": kind.name, "version": kind.version, **entries}, extra)
    with staged_directory(directory, overwrite=overwrite) as stage:
        write_json(stage / CONFIG_NAME, metadata)
        save_arrays(stage / kind.file, arrays)
