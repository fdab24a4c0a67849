"""Native format of models, written and read by this package.

A directory that can be copied, committed and shipped as package data:

    config.json     format, version, model, vocabulary, stored type; readable
    params/         the weights, in Orbax's format
    spiece.model    the SentencePiece model, or
    tokenizer.json  another vocabulary, such as Unigram or WordPiece (bytes need no file)
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
from spec_t5x.models.binding import family_of
from spec_t5x.models.t5 import NetworkConfig
from spec_t5x.models.weights import BITS
from spec_t5x.names import AUTO, INT8, WEIGHTS
from spec_t5x.types import EOS_ID

FORMAT = "spec_t5x"
VERSION = 1
# Version with matrices in int8 or int4, which earlier releases cannot read.
_ROUNDED_VERSION = 2
PARAMS_NAME = "params"
_OWN_ENTRIES = ("format", "version", "network", "model", "vocabulary", "stored_dtype", "weights")
# Entries of "vocabulary" that some vocabularies have.
_MAPPED_IDS = ("num_ids", "start_id", "eos_id")
_READS_SENTINELS, _CLEANS_UP, _MORE_EOS = "reads_sentinels", "cleans_up", "more_eos_ids"


def write_model(stage: Path, stored: StoredModel, dtype: str, report: Report | None) -> None:
    """Writes all of a model but its vocabulary to the directory ``stage``; see ``formats``."""
    stored.known_vocabulary()
    write_json(stage / CONFIG_NAME, describe(stored, dtype))
    is_rounded, in_bytes = stored.weights != AUTO, dtype == INT8
    if is_rounded and in_bytes:
        raise InputError(f"weights are {stored.weights} and dtype {dtype}: give another dtype")
    read_as = "float32" if is_rounded or in_bytes else dtype
    tensors = read_tensors(stored.tensors, str(stored.directory), read_as, report)
    if is_rounded:
        tensors = rounded.split(tensors, BITS[stored.weights], dtype)
    elif in_bytes:
        tensors = rounded.split_exactly(tensors)
    write_tree(stage / PARAMS_NAME, ((tuple(path.split("/")), array) for path, array in tensors))


def open_model(directory: Path, values: dict[str, Any]) -> StoredModel:
    """Opens a checkpoint that ``write_model`` wrote; ``values`` is its config.json."""
    path = directory / PARAMS_NAME
    if not path.is_dir():
        raise InputError(f"no directory {path}: copy the whole checkpoint")
    config = read_config(values, directory / CONFIG_NAME)
    weights = values.get("weights", AUTO)
    check_known(directory / CONFIG_NAME, "weights", weights, WEIGHTS)
    entries = {"/".join(keys): entry for keys, entry in orbax_entries(path).items()}
    tensors = open_tensors(entries, str(path))
    if weights != AUTO or values.get("stored_dtype") == INT8:
        tensors = rounded.join(tensors, str(path), "bfloat16" if weights == AUTO else "float32")
    return StoredModel(
        tensors=tensors,
        config=config,
        weights=weights,
        vocabulary=read_vocabulary(directory, values),
        directory=directory,
        metadata=extra_entries(values),
    )


def describe(stored: StoredModel, dtype: str) -> dict[str, Any]:
    """Returns config.json for a model stored as ``dtype``, with the entries of its metadata."""
    config, vocabulary, weights = stored.config, stored.vocabulary, stored.weights
    metadata = {
        "format": FORMAT,
        "version": VERSION if weights == AUTO and dtype != INT8 else _ROUNDED_VERSION,
        "network": _name_of("family", lambda family: family is family_of(config)),
        "model": config.to_dict(),
        "vocabulary": None if vocabulary is None else _describe_vocabulary(vocabulary),
        "stored_dtype": dtype,
    }
    if weights != AUTO:
        metadata["weights"] = weights
    return with_extra(metadata, stored.metadata)


def _name_of(kind: str, fits: Callable[[Any], bool]) -> str:
    """Returns the registered name of the first entry of ``kind`` for which ``fits`` is true."""
    return next(name for name, entry in registry.find_all(kind).items() if fits(entry))


def _describe_vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    more = list(vocabulary.eos_ids[1:])
    if isinstance(vocabulary, ByteVocabulary):
        entry = {"kind": "bytes"}
    elif isinstance(vocabulary, SentencePieceVocabulary):
        entry = {"kind": "sentencepiece", "file": SPIECE_NAME}
    elif isinstance(vocabulary, MappedVocabulary):
        # Ids of the tokenizer, before renumbering.
        ids = {name: getattr(vocabulary, name) for name in _MAPPED_IDS}
        entry = {"kind": "mapped", "file": TOKENIZER_NAME, **ids}
        more = list(vocabulary.more_eos_ids)
    else:
        kind = _name_of("tokenizer", lambda cls: isinstance(vocabulary, cls))
        entry = {"kind": kind, "file": TOKENIZER_NAME}
    reads = getattr(vocabulary, _READS_SENTINELS, False)
    some = {_MORE_EOS: more, _READS_SENTINELS: reads, _CLEANS_UP: vocabulary.cleans_up}
    entry |= {name: value for name, value in some.items() if value}
    return {**entry, "extra_ids": vocabulary.extra_ids, "fingerprint": vocabulary.fingerprint()}


def read_config(metadata: dict[str, Any], path: Location) -> NetworkConfig:
    """Returns the network's configuration in ``metadata``, a config.json read from ``path``."""
    is_whole = metadata.get("weights", AUTO) == AUTO and metadata.get("stored_dtype") != INT8
    version = VERSION if is_whole else _ROUNDED_VERSION
    check_format(metadata, path, FORMAT, version, "load it with spec_t5x.checkpoints.loading.load")
    network = metadata.get("network")
    check_known(path, "network", network, registry.names("family"))
    with describing(path, f"{network.upper()} under 'model'"):
        return registry.find("family", network).config.from_dict(metadata["model"])


def extra_entries(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of ``metadata``, a config.json, that the format does not define."""
    return {name: value for name, value in metadata.items() if name not in _OWN_ENTRIES}


def read_vocabulary(directory: Location, values: dict[str, Any]) -> Vocabulary:
    """Reads the vocabulary that a config.json describes, and checks its fingerprint."""
    entry = values.get("vocabulary")
    entry = entry if isinstance(entry, dict) else {}
    kind, tokenizers = entry.get("kind"), registry.names("tokenizer")
    extra_ids, more = entry.get("extra_ids", 0), entry.get(_MORE_EOS, ())
    reads = entry.get(_READS_SENTINELS, False)
    if kind == "bytes":
        vocabulary = ByteVocabulary(extra_ids, reads)
    elif kind == "sentencepiece":
        vocabulary = SentencePieceVocabulary(local_file(directory / SPIECE_NAME), extra_ids, reads)
    elif kind in tokenizers:
        vocabulary = registry.find("tokenizer", kind)(local_file(directory / TOKENIZER_NAME))
    elif kind == "mapped":
        ids = {name: entry.get(name, 0) for name in _MAPPED_IDS}
        tokenizer = read_tokenizer(local_file(directory / TOKENIZER_NAME))
        if tokenizer is None:
            raise InputError(f"no vocabulary at {directory / TOKENIZER_NAME}: copy it there")
        vocabulary = MappedVocabulary(tokenizer, **ids, more_eos_ids=more)
    else:
        raise InputError(
            f"{directory / CONFIG_NAME} has vocabulary {kind!r}: "
            f"it must be sentencepiece, {', '.join(tokenizers)}, mapped or bytes"
        )
    if kind != "mapped":
        vocabulary.eos_ids = (EOS_ID, *more)
    vocabulary.cleans_up = entry.get(_CLEANS_UP, False)
    if vocabulary.fingerprint() != entry.get("fingerprint"):
        raise InputError(
            f"{directory / entry.get('file', CONFIG_NAME)} is not the vocabulary that "
            f"{CONFIG_NAME} fingerprints ({str(entry.get('fingerprint'))[:12]}...): restore the "
            "file"
        )
    return vocabulary
