"""The project's own checkpoints.

A directory that can be copied, committed and shipped as package data:

    config.json     format, version, model, vocabulary, stored type; readable
    params/         the weights, as Orbax writes and restores them
    spiece.model    the SentencePiece model, or
    tokenizer.json  another vocabulary, as Unigram or WordPiece (neither when it is bytes)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from spec_t5x import registry
from spec_t5x.checkpoints.native import rounded
from spec_t5x.checkpoints.native.directory import check_format, check_known, with_extra
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing, write_json
from spec_t5x.checkpoints.storage.locations import Location
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensors import Report, read_tensors
from spec_t5x.checkpoints.storage.tensorstore_arrays import open_tensors, orbax_entries, write_tree
from spec_t5x.checkpoints.storage.vocabularies import local_file
from spec_t5x.data.mapped_vocabulary import MappedVocabulary, read_tokenizer
from spec_t5x.data.tokenizer_vocabulary import TOKENIZER_NAME
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
from spec_t5x.errors import InputError
from spec_t5x.models.binding import ModelConfig
from spec_t5x.models.weights import BITS
from spec_t5x.names import AUTO, WEIGHTS
from spec_t5x.types import EOS_ID, PyTree

FORMAT = "spec_t5x"
VERSION = 1
# With rounded matrices, which earlier releases cannot read.
_ROUNDED_VERSION = 2
PARAMS_NAME = "params"
_OWN_ENTRIES = ("format", "version", "network", "model", "vocabulary", "stored_dtype", "weights")
_MAPPED_IDS = ("num_ids", "start_id", "eos_id")
# Of the same, where several tokens end an output.
_READS_SENTINELS, _CLEANS_UP = "reads_sentinels", "cleans_up"
_MORE_EOS = "more_eos_ids"
# The family where config.json has no "network", as checkpoints from before there were two.
_FIRST = "t5"


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
        overwrite: replace an earlier checkpoint.

    Raises:
        InputError: the directory is taken, the parameters do not fit the
            configuration or are not finite, or an argument is none of the above.
    """
    vocabulary = vocabulary_or_path
    if isinstance(vocabulary, str | Path):
        vocabulary = SentencePieceVocabulary(vocabulary)
    stored = StoredModel.of_params(directory, params, config, vocabulary, extra)
    stored.write(directory, write_model, dtype=dtype, overwrite=overwrite)


def write_model(stage: Path, stored: StoredModel, dtype: str, report: Report | None) -> None:
    """``save_model`` of a stored model; see ``formats``."""
    stored.known_vocabulary()
    write_json(stage / CONFIG_NAME, describe(stored, dtype))
    source = str(stored.directory)
    if stored.weights == AUTO:
        tensors = read_tensors(stored.tensors, source, dtype, report)
    else:
        whole = read_tensors(stored.tensors, source, "float32", report)
        tensors = rounded.split(whole, BITS[stored.weights], dtype)
    write_tree(stage / PARAMS_NAME, ((tuple(path.split("/")), array) for path, array in tensors))


def open_model(directory: Path, values: dict[str, Any]) -> StoredModel:
    """Opens a checkpoint that ``save_model`` wrote; see ``formats``."""
    path = directory / PARAMS_NAME
    if not path.is_dir():
        raise InputError(f"no directory {path}: copy the whole checkpoint")
    config = read_config(values, directory / CONFIG_NAME)
    weights = values.get("weights", AUTO)
    check_known(directory / CONFIG_NAME, "weights", weights, WEIGHTS)
    entries = {"/".join(keys): entry for keys, entry in orbax_entries(path).items()}
    tensors = open_tensors(entries, str(path))
    return StoredModel(
        tensors=tensors if weights == AUTO else rounded.join(tensors, str(path)),
        config=config,
        weights=weights,
        vocabulary=read_vocabulary(directory, values),
        directory=directory,
        metadata=extra_entries(values),
    )


def describe(stored: StoredModel, dtype: str) -> dict[str, Any]:
    """What config.json holds of a model, its further entries included."""
    config, vocabulary, weights = stored.config, stored.vocabulary, stored.weights
    metadata = {
        "format": FORMAT,
        "version": VERSION if weights == AUTO else _ROUNDED_VERSION,
        "network": _name_of("family", lambda family: isinstance(config, family.config)),
        "model": config.to_dict(),
        "vocabulary": None if vocabulary is None else _describe_vocabulary(vocabulary),
        "stored_dtype": dtype,
    }
    if weights != AUTO:
        metadata["weights"] = weights
    return with_extra(metadata, stored.metadata)


def _name_of(kind: str, fits: Callable[[Any], bool]) -> str:
    """The name of the first entry that fits."""
    return next(name for name, entry in registry.find_all(kind).items() if fits(entry))


def _describe_vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    if isinstance(vocabulary, ByteVocabulary):
        kind = {"kind": "bytes"}
        if vocabulary.reads_sentinels:
            kind[_READS_SENTINELS] = True
    elif isinstance(vocabulary, SentencePieceVocabulary):
        kind = {"kind": "sentencepiece", "file": SPIECE_NAME}
    elif not isinstance(vocabulary, MappedVocabulary):
        kind = _name_of("tokenizer", lambda cls: isinstance(vocabulary, cls))
        kind = {"kind": kind, "file": TOKENIZER_NAME}
    if isinstance(vocabulary, MappedVocabulary):
        # Renumbered, see there.
        ids = {name: getattr(vocabulary, name) for name in _MAPPED_IDS}
        kind = {"kind": "mapped", "file": TOKENIZER_NAME, **ids}
        if vocabulary.more_eos_ids:
            kind[_MORE_EOS] = list(vocabulary.more_eos_ids)
    elif len(vocabulary.eos_ids) > 1:
        kind[_MORE_EOS] = list(vocabulary.eos_ids[1:])
    if vocabulary.cleans_up:
        kind[_CLEANS_UP] = True
    return {**kind, "extra_ids": vocabulary.extra_ids, "fingerprint": vocabulary.fingerprint()}


def read_config(metadata: dict[str, Any], path: Location) -> ModelConfig:
    """The model that ``metadata``, read from ``path``, describes."""
    version = VERSION if metadata.get("weights", AUTO) == AUTO else _ROUNDED_VERSION
    check_format(metadata, path, FORMAT, version, "load it with spec_t5x.checkpoints.loading.load")
    network = metadata.get("network", _FIRST)
    check_known(path, "network", network, registry.names("family"))
    with describing(path, f"{network.upper()} under 'model'"):
        return registry.find("family", network).config.from_dict(metadata["model"])


def extra_entries(metadata: dict[str, Any]) -> dict[str, Any]:
    """What of ``metadata`` is not the format's own."""
    return {name: value for name, value in metadata.items() if name not in _OWN_ENTRIES}


def read_vocabulary(directory: Location, values: dict[str, Any]) -> Vocabulary:
    """The vocabulary that ``values`` describes."""
    entry = values.get("vocabulary")
    entry = entry if isinstance(entry, dict) else {}
    extra_ids, tokenizers = entry.get("extra_ids", 0), registry.names("tokenizer")
    if entry.get("kind") == "bytes":
        vocabulary = ByteVocabulary(extra_ids, entry.get(_READS_SENTINELS, False))
    elif entry.get("kind") == "sentencepiece":
        vocabulary = SentencePieceVocabulary(local_file(directory / SPIECE_NAME), extra_ids)
    elif entry.get("kind") in tokenizers:
        path = local_file(directory / TOKENIZER_NAME)
        vocabulary = registry.find("tokenizer", entry["kind"])(path)
    elif entry.get("kind") == "mapped":
        ids = {name: entry.get(name, 0) for name in _MAPPED_IDS}
        tokenizer = read_tokenizer(local_file(directory / TOKENIZER_NAME))
        if tokenizer is None:
            raise InputError(f"no vocabulary at {directory / TOKENIZER_NAME}: copy it there")
        vocabulary = MappedVocabulary(tokenizer, **ids, more_eos_ids=entry.get(_MORE_EOS, ()))
    else:
        raise InputError(
            f"{directory / CONFIG_NAME} has vocabulary {entry.get('kind')!r}: "
            f"it must be sentencepiece, {', '.join(tokenizers)}, mapped or bytes"
        )
    if entry["kind"] != "mapped":
        vocabulary.eos_ids = (EOS_ID, *entry.get(_MORE_EOS, ()))
    vocabulary.cleans_up = entry.get(_CLEANS_UP, False)
    if vocabulary.fingerprint() != entry.get("fingerprint"):
        raise InputError(
            f"{directory / entry.get('file', CONFIG_NAME)} is not the vocabulary that "
            f"{CONFIG_NAME} fingerprints ({str(entry.get('fingerprint'))[:12]}...): restore the "
            "file"
        )
    return vocabulary
