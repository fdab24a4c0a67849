"""The project's own checkpoints.

A directory that can be copied, committed and shipped as package data:

    config.json     format, version, model, vocabulary, stored type; readable
    params/         the weights, as Orbax writes and restores them
    spiece.model    the SentencePiece model, or
    tokenizer.json  another vocabulary, as WordPiece (neither when it is bytes)
"""

from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.own.formats import check_format, check_stored_dtype, with_extra
from spec_t5x.checkpoints.storage.files import (
    CONFIG_NAME,
    one_line,
    read_json,
    staged_directory,
    write_json,
)
from spec_t5x.checkpoints.storage.loaded_model import LoadedModel
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.orbax_trees import orbax_entries, write_tree
from spec_t5x.checkpoints.storage.stored_model import Shardings, StoredModel
from spec_t5x.checkpoints.storage.tensorstore_arrays import TensorStoreWeights, open_arrays
from spec_t5x.checkpoints.storage.validate import check_vocabulary_fits
from spec_t5x.checkpoints.storage.vocabularies import local_file
from spec_t5x.checkpoints.storage.weights import ArrayWeights, Report, read_tensors
from spec_t5x.data.mapped_vocabulary import MappedVocabulary, read_tokenizer
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
from spec_t5x.data.wordpiece import TOKENIZER_NAME, WordPieceVocabulary
from spec_t5x.errors import InputError
from spec_t5x.models.binding import ModelConfig
from spec_t5x.models.gpt import GPTConfig
from spec_t5x.models.t5 import T5Config
from spec_t5x.types import PyTree

FORMAT = "spec_t5x"
VERSION = 1
PARAMS_NAME = "params"
_OWN_ENTRIES = ("format", "version", "network", "model", "vocabulary", "stored_dtype")
_MAPPED_IDS = ("num_ids", "start_id", "eos_id")
# Of config.json's "network"; checkpoints from before there were two say nothing.
_NETWORKS = {"t5": T5Config, "gpt": GPTConfig}


def save_model(
    directory: str | Path,
    params: PyTree,
    config: ModelConfig,
    vocabulary_or_path: Vocabulary | str | Path,
    *,
    dtype: str = "bfloat16",
    extra: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint, completely or not at all.

    Args:
        directory: where; its parents are made.
        params: the tree of the network of ``config``, without an outer "params".
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
    stored = StoredModel(
        weights=ArrayWeights(params, source),
        config=config,
        vocabulary=_as_vocabulary(vocabulary_or_path),
        directory=Path(directory),
        metadata={},
    )
    write_native(directory, stored, dtype=dtype, extra=extra, overwrite=overwrite)


def write_native(
    directory: str | Path,
    stored: StoredModel,
    *,
    dtype: str,
    extra: dict[str, Any] | None = None,
    overwrite: bool = False,
    report: Report | None = None,
) -> None:
    """``save_model`` of a model that is read as it is written, tensor by tensor.

    Args:
        directory: as ``save_model``.
        stored: the model.
        dtype: as ``save_model``.
        extra: as ``save_model``.
        overwrite: as ``save_model``.
        report: told the bytes read so far and in all, after each tensor.

    Raises:
        InputError: as ``save_model``.
    """
    vocabulary = stored.known_vocabulary()
    check_vocabulary_fits(vocabulary, stored.config, stored.weights.source)
    stored.weights.check(stored.config)
    metadata = describe(stored.config, vocabulary, dtype, extra or {})
    with staged_directory(directory, overwrite=overwrite) as stage:
        write_json(stage / CONFIG_NAME, metadata)
        vocabulary.save(stage)
        tensors = read_tensors(stored.weights, dtype, report)
        write_tree(
            stage / PARAMS_NAME, ((tuple(path.split("/")), array) for path, array in tensors)
        )


def load_model(
    directory: str | Path,
    *,
    dtype: str = "float32",
    on_host: bool = False,
    shardings: Shardings | None = None,
) -> LoadedModel:
    """Reads a checkpoint that ``save_model`` wrote, on any machine.

    Args:
        directory: the checkpoint; it is only read.
        dtype: "float32" or "bfloat16", of the parameters and of ``config.dtype``.
        on_host: leave the parameters in host memory as numpy arrays; else they go to
            JAX's default device.
        shardings: where they are to go instead, and then only the slices that devices of
            this process hold are read.

    Raises:
        InputError: the directory is no such checkpoint, or is damaged.
    """
    return open_native(directory).load(dtype=dtype, on_host=on_host, shardings=shardings)


def open_native(directory: str | Path) -> StoredModel:
    """Opens a checkpoint that ``save_model`` wrote; its weights are read later.

    Raises:
        InputError: as ``load_model``, for all but the weights themselves.
    """
    directory = Path(directory)
    metadata = read_json(directory / CONFIG_NAME)
    config = read_config(metadata, directory / CONFIG_NAME)
    vocabulary = read_vocabulary(metadata, directory)
    check_vocabulary_fits(vocabulary, config, str(directory))
    return StoredModel(
        weights=_open_params(directory / PARAMS_NAME),
        config=config,
        vocabulary=vocabulary,
        directory=directory,
        metadata=metadata,
    )


def _as_vocabulary(vocabulary_or_path: Vocabulary | str | Path) -> Vocabulary:
    if isinstance(vocabulary_or_path, str | Path):
        return SentencePieceVocabulary(vocabulary_or_path)
    return vocabulary_or_path


def describe(
    config: ModelConfig, vocabulary: Vocabulary | None, dtype: str, extra: dict[str, Any]
) -> dict[str, Any]:
    """What config.json holds of a model, with ``extra`` entries.

    Raises:
        InputError: an unknown ``dtype``, or an extra entry of a name of the format's own.
    """
    check_stored_dtype(dtype)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "network": next(name for name, cls in _NETWORKS.items() if isinstance(config, cls)),
        "model": config.to_dict(),
        "vocabulary": None if vocabulary is None else _describe_vocabulary(vocabulary),
        "stored_dtype": dtype,
    }
    return with_extra(metadata, extra)


def _describe_vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    if isinstance(vocabulary, ByteVocabulary):
        kind = {"kind": "bytes"}
    elif isinstance(vocabulary, WordPieceVocabulary):
        kind = {"kind": "wordpiece", "file": TOKENIZER_NAME}
    else:
        kind = {"kind": "sentencepiece", "file": SPIECE_NAME}
    if isinstance(vocabulary, MappedVocabulary):
        # Renumbered, see there.
        ids = {name: getattr(vocabulary, name) for name in _MAPPED_IDS}
        kind = {"kind": "mapped", "file": TOKENIZER_NAME, **ids}
    return {**kind, "extra_ids": vocabulary.extra_ids, "fingerprint": vocabulary.fingerprint()}


def read_config(metadata: dict[str, Any], path: Location) -> ModelConfig:
    """The model that ``metadata``, read from ``path``, describes.

    Raises:
        InputError: it is of another format or version, or describes none.
    """
    check_format(metadata, path, FORMAT, VERSION, "load it with spec_t5x.checkpoints.loading.load")
    network = metadata.get("network", "t5")
    if network not in _NETWORKS:
        raise InputError(
            f"{path} has network {network!r}, this spec_t5x reads {' and '.join(_NETWORKS)}: "
            "install the release that wrote it"
        )
    try:
        return _NETWORKS[network].from_dict(metadata["model"])
    except (InputError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} describes no {network.upper()} under 'model' ({one_line(error)}): copy it "
            "again"
        ) from error


def extra_entries(metadata: dict[str, Any]) -> dict[str, Any]:
    """What of ``metadata`` is not the format's own."""
    return {name: value for name, value in metadata.items() if name not in _OWN_ENTRIES}


def read_vocabulary(metadata: dict[str, Any], directory: Location) -> Vocabulary:
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
        vocabulary = SentencePieceVocabulary(local_file(directory / SPIECE_NAME), extra_ids)
    elif entry.get("kind") == "wordpiece":
        vocabulary = WordPieceVocabulary(local_file(directory / TOKENIZER_NAME))
    elif entry.get("kind") == "mapped":
        ids = {name: entry.get(name, 0) for name in _MAPPED_IDS}
        tokenizer = local_file(directory / TOKENIZER_NAME)
        vocabulary = MappedVocabulary(read_tokenizer(tokenizer), **ids)
    else:
        raise InputError(
            f"{directory / CONFIG_NAME} has vocabulary {entry.get('kind')!r}: "
            "it must be sentencepiece, wordpiece, mapped or bytes"
        )
    if vocabulary.fingerprint() != entry.get("fingerprint"):
        raise InputError(
            f"{directory / entry.get('file', CONFIG_NAME)} is not the vocabulary that "
            f"{CONFIG_NAME} fingerprints ({str(entry.get('fingerprint'))[:12]}...): restore the "
            "file"
        )
    return vocabulary


def _open_params(path: Path) -> TensorStoreWeights:
    if not path.is_dir():
        raise InputError(f"no directory {path}: copy the whole checkpoint")
    entries = {"/".join(keys): entry for keys, entry in orbax_entries(path).items()}
    return TensorStoreWeights(open_arrays(entries, str(path)), str(path))
