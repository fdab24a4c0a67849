"""The project's own checkpoints.

A directory that can be copied, committed and shipped as package data:

    config.json     format, version, model, vocabulary, stored type; readable
    params/         the weights, written by Orbax
    spiece.model    the SentencePiece model (absent when the vocabulary is bytes)
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_t5x.checkpoints.files import (
    CONFIG_NAME,
    one_line,
    read_json,
    staged_directory,
    write_json,
)
from spec_t5x.checkpoints.loaded_model import LoadedModel
from spec_t5x.checkpoints.validate import check_params, check_vocabulary_fits
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
from spec_t5x.errors import InputError
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import PyTree

FORMAT = "spec_t5x"
VERSION = 1
PARAMS_NAME = "params"


def save_model(
    directory: str | Path,
    params: PyTree,
    config: T5Config,
    vocabulary_or_path: Vocabulary | str | Path,
    *,
    dtype: str = "bfloat16",
    extra: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint, completely or not at all.

    Args:
        directory: where; its parents are made.
        params: the tree of ``Transformer(config)``, without an outer "params".
        config: the model.
        vocabulary_or_path: a vocabulary, or a SentencePiece file without extra ids.
        dtype: "bfloat16" or "float32", the type of the stored weights.
        extra: more entries for config.json (training steps, scores, ...).
        overwrite: whether an earlier checkpoint may be replaced.

    Raises:
        InputError: the directory is taken, the parameters do not fit the
            configuration or are not finite, or an argument is none of the above.
    """
    source = f"parameters for {directory}"
    vocabulary = _as_vocabulary(vocabulary_or_path)
    check_vocabulary_fits(vocabulary, config, source)
    check_params(params, config, source)
    metadata = _metadata(config, vocabulary, dtype, extra or {})
    stored = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.dtype(dtype)), params)
    with staged_directory(directory, overwrite=overwrite) as stage:
        write_json(stage / CONFIG_NAME, metadata)
        vocabulary.save(stage)
        _write_params(stage / PARAMS_NAME, stored)


def load_model(
    directory: str | Path, *, dtype: str = "float32", on_host: bool = False
) -> LoadedModel:
    """Reads a checkpoint that ``save_model`` wrote, on any machine.

    Args:
        directory: the checkpoint; it is only read.
        dtype: "float32" or "bfloat16", of the parameters and of ``config.dtype``.
        on_host: leave the parameters in host memory as numpy arrays, for
            callers that shard them; else they go to JAX's default device.

    Raises:
        InputError: the directory is no such checkpoint, or is damaged.
    """
    directory = Path(directory)
    metadata = read_json(directory / CONFIG_NAME)
    config = _read_config(metadata, directory / CONFIG_NAME, dtype)
    vocabulary = read_vocabulary(metadata, directory)
    check_vocabulary_fits(vocabulary, config, str(directory))
    params = _read_params(directory / PARAMS_NAME, dtype)
    check_params(params, config, str(directory / PARAMS_NAME))
    return LoadedModel(
        params=params if on_host else jax.device_put(params),
        config=config,
        vocabulary=vocabulary,
        directory=directory,
        metadata=metadata,
    )


def _as_vocabulary(vocabulary_or_path: Vocabulary | str | Path) -> Vocabulary:
    if isinstance(vocabulary_or_path, str | Path):
        return SentencePieceVocabulary(vocabulary_or_path)
    return vocabulary_or_path


def _metadata(
    config: T5Config, vocabulary: Vocabulary, dtype: str, extra: dict[str, Any]
) -> dict[str, Any]:
    if dtype not in ("bfloat16", "float32"):
        raise InputError(f"stored dtype is {dtype!r}: choose bfloat16 or float32")
    is_bytes = isinstance(vocabulary, ByteVocabulary)
    kind = {"kind": "bytes"} if is_bytes else {"kind": "sentencepiece", "file": SPIECE_NAME}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": config.to_dict(),
        "vocabulary": {
            **kind,
            "extra_ids": vocabulary.extra_ids,
            "fingerprint": vocabulary.fingerprint(),
        },
        "stored_dtype": dtype,
    }
    taken = sorted(set(metadata) & set(extra))
    if taken:
        raise InputError(f"extra entry {taken[0]!r} is the format's own: rename it")
    return {**metadata, **extra}


def _read_config(metadata: dict[str, Any], path: Path, dtype: str) -> T5Config:
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {metadata.get('format')!r}, not {FORMAT!r}: "
            "load it with spec_t5x.checkpoints.loading.load"
        )
    if metadata.get("version") != VERSION:
        raise InputError(
            f"{path} has version {metadata.get('version')!r}, this spec_t5x reads "
            f"{VERSION}: install the release that wrote it"
        )
    try:
        config = T5Config.from_dict(metadata["model"])
    except (InputError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} describes no T5 under 'model' ({one_line(error)}): copy it again"
        ) from error
    return dataclasses.replace(config, dtype=dtype)


def read_vocabulary(metadata: dict[str, Any], directory: Path) -> Vocabulary:
    """The vocabulary of a checkpoint whose config.json holds ``metadata``.

    Raises:
        InputError: there is none, or it is not the one that was saved.
    """
    entry = metadata.get("vocabulary")
    entry = entry if isinstance(entry, dict) else {}
    extra_ids = entry.get("extra_ids", 0)
    if entry.get("kind") == "bytes":
        vocabulary = ByteVocabulary(extra_ids)
    elif entry.get("kind") == "sentencepiece":
        vocabulary = SentencePieceVocabulary(directory / SPIECE_NAME, extra_ids)
    else:
        raise InputError(
            f"{directory / CONFIG_NAME} has vocabulary {entry.get('kind')!r}: "
            "it must be sentencepiece or bytes"
        )
    if vocabulary.fingerprint() != entry.get("fingerprint"):
        raise InputError(
            f"{directory / SPIECE_NAME} is not the vocabulary that {CONFIG_NAME} "
            f"fingerprints ({str(entry.get('fingerprint'))[:12]}...): restore the file"
        )
    return vocabulary


def _write_params(path: Path, params: PyTree) -> None:
    # Orbax takes a moment to import: only where weights move.
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path.resolve(), params)
    # What Orbax notes about the machine and the time has no place in a file that
    # is committed and shipped. It reads the checkpoint without them.
    (path / "commit_success.txt").write_text("Checkpoint commit was successful\n")
    metadata_path = path / "_CHECKPOINT_METADATA"
    metadata = json.loads(metadata_path.read_text())
    metadata.update(init_timestamp_nsecs=None, commit_timestamp_nsecs=None)
    metadata_path.write_text(json.dumps(metadata))


def _read_params(path: Path, dtype: str) -> PyTree:
    """The stored tree as numpy arrays of ``dtype``, whatever devices wrote it."""
    import orbax.checkpoint as ocp

    if not path.is_dir():
        raise InputError(f"no directory {path}: copy the whole checkpoint")
    # Orbax reads it too, but its complaint would not name the file.
    read_json(path / "_METADATA")
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.metadata(path.resolve()).item_metadata.tree
            as_numpy = ocp.RestoreArgs(restore_type=np.ndarray, dtype=jnp.dtype(dtype))
            restore_args = jax.tree.map(lambda _: as_numpy, tree)
            return checkpointer.restore(path.resolve(), restore_args=restore_args)
    except Exception as error:  # Orbax and TensorStore raise assorted types
        raise InputError(
            f"cannot read the weights in {path} ({one_line(error)}): "
            "copy the whole checkpoint again"
        ) from error
