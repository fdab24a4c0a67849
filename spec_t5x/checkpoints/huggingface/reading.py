"""Hugging Face's T5 and mT5 directories, read and written without transformers."""

import dataclasses
from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.huggingface.config import (
    check_supported,
    config_values,
    model_type,
    read_config,
    special_ids,
)
from spec_t5x.checkpoints.huggingface.weights import (
    HuggingFaceWeights,
    open_tensors,
    settle_output_layer,
)
from spec_t5x.checkpoints.huggingface.writing import SHARD_BYTES, write_weights
from spec_t5x.checkpoints.storage.files import (
    CONFIG_NAME,
    one_line,
    read_json,
    staged_directory,
    write_json,
)
from spec_t5x.checkpoints.storage.loaded_model import LoadedModel
from spec_t5x.checkpoints.storage.stored_model import Shardings, StoredModel
from spec_t5x.checkpoints.storage.validate import check_vocabulary_fits
from spec_t5x.checkpoints.storage.vocabularies import (
    VocabularyLike,
    choose_vocabulary,
    make_vocabulary,
)
from spec_t5x.checkpoints.storage.weights import ArrayWeights, Report
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
from spec_t5x.errors import InputError


def load_huggingface(
    directory: str | Path,
    *,
    dtype: str = "float32",
    on_host: bool = False,
    vocabulary: VocabularyLike | None = None,
    shardings: Shardings | None = None,
) -> LoadedModel:
    """Reads a T5 1.0, T5 1.1, Flan-T5, mT5 or ByT5 that transformers wrote.

    Args:
        directory: config.json, weights (``model.safetensors`` or
            ``pytorch_model.bin``, whole or in shards) and ``spiece.model``, which
            ByT5 does without.
        dtype: "float32" or "bfloat16", of the parameters and of ``config.dtype``.
        on_host: leave the parameters in host memory as numpy arrays; else they go to
            JAX's default device.
        vocabulary: for a directory without ``spiece.model``.
        shardings: where the parameters are to go instead, and then only the slices that
            devices of this process hold are read.

    Raises:
        InputError: files are absent or damaged, or the model is not one that
            decodes as T5 does.
    """
    stored = open_huggingface(directory, vocabulary=vocabulary)
    return stored.load(dtype=dtype, on_host=on_host, shardings=shardings)


def open_huggingface(
    directory: str | Path, *, vocabulary: VocabularyLike | None = None
) -> StoredModel:
    """Opens what ``load_huggingface`` loads; the weights are read later.

    Raises:
        InputError: as ``load_huggingface``, for all but the weights themselves.
    """
    directory = Path(directory)
    values = read_json(directory / CONFIG_NAME)
    check_supported(values, directory)
    config = read_config(values, directory / CONFIG_NAME)
    chosen = _choose_vocabulary(values, directory, vocabulary, config.vocab_size)
    check_vocabulary_fits(chosen, config, str(directory))
    tensors = open_tensors(directory)
    rescales = settle_output_layer(tensors, values, directory)
    config = dataclasses.replace(config, logits_via_embedding=rescales)
    return StoredModel(
        weights=HuggingFaceWeights(tensors, config, str(directory)),
        config=config,
        vocabulary=chosen,
        directory=directory,
        metadata=values,
    )


def export_huggingface(
    directory: str | Path,
    loaded: LoadedModel,
    *,
    dtype: str = "float32",
    overwrite: bool = False,
) -> None:
    """Writes a model so that ``T5ForConditionalGeneration.from_pretrained`` reads it.

    Args:
        directory: where; its parents are made.
        loaded: the model and its vocabulary.
        dtype: "float32" or "bfloat16", the type of the stored weights.
        overwrite: whether an earlier checkpoint may be replaced.

    Raises:
        InputError: the directory is taken, or transformers has no such T5.
    """
    stored = StoredModel(
        weights=ArrayWeights(loaded.params, f"parameters for {directory}"),
        config=loaded.config,
        vocabulary=loaded.vocabulary,
        directory=loaded.directory,
        metadata=loaded.metadata,
    )
    write_huggingface(directory, stored, dtype=dtype, overwrite=overwrite)


def write_huggingface(
    directory: str | Path,
    stored: StoredModel,
    *,
    dtype: str,
    overwrite: bool = False,
    report: Report | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """``export_huggingface`` of a model that is read as it is written, tensor by tensor.

    Args:
        directory: where; its parents are made.
        stored: the model. What transformers calls it (``t5`` or ``mt5``) is what it was
            called before, or told from its sizes.
        dtype: as ``export_huggingface``.
        overwrite: as ``export_huggingface``.
        report: told the bytes written so far and in all, after each tensor.
        shard_bytes: larger models are written in files of at most this size, and an index.

    Raises:
        InputError: as ``export_huggingface``; the weights are damaged or do not fit.
    """
    values = config_values(stored.config, dtype, model_type(stored.config, stored.metadata))
    vocabulary = stored.known_vocabulary()
    stored.weights.check(stored.config)
    with staged_directory(directory, overwrite=overwrite) as stage:
        write_json(stage / CONFIG_NAME, values)
        write_json(stage / "generation_config.json", special_ids())
        write_json(stage / "tokenizer_config.json", _tokenizer_values(vocabulary))
        vocabulary.save(stage)
        write_weights(
            stage, stored.weights, stored.config, dtype, report=report, shard_bytes=shard_bytes
        )


def read_vocabulary(values: dict[str, Any], directory: Path) -> Vocabulary:
    """The vocabulary of a checkpoint whose config.json holds ``values``.

    Raises:
        InputError: there is none, or one that is not T5's kind.
    """
    tokenizer = _tokenizer(directory)
    vocabulary = _base_vocabulary(values, tokenizer, directory)
    _check_added_tokens(tokenizer, vocabulary, directory)
    return vocabulary


def _choose_vocabulary(
    values: dict[str, Any], directory: Path, given: VocabularyLike | None, num_rows: int
) -> Vocabulary:
    """The directory's own; the given one where it has none, or not in T5's format."""
    if given is not None and not has_vocabulary(directory):
        return make_vocabulary(given, num_rows)
    return choose_vocabulary(given, read_vocabulary(values, directory), directory, num_rows)


def has_vocabulary(directory: Path) -> bool:
    """Whether a Hugging Face directory says what its ids mean, in a way that we read."""
    return (directory / SPIECE_NAME).is_file() or _is_bytes(_tokenizer(directory))


def _tokenizer(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _is_bytes(tokenizer: dict[str, Any]) -> bool:
    return str(tokenizer.get("tokenizer_class", "")).startswith("ByT5")


def _base_vocabulary(
    values: dict[str, Any], tokenizer: dict[str, Any], directory: Path
) -> Vocabulary:
    spiece = directory / SPIECE_NAME
    extra_ids = tokenizer.get("extra_ids")
    if _is_bytes(tokenizer):
        return ByteVocabulary(125 if extra_ids is None else extra_ids)
    if spiece.is_file():
        # mT5's file holds its sentinels already, T5's does not.
        default = 0 if values["model_type"] == "mt5" else 100
        return SentencePieceVocabulary(spiece, default if extra_ids is None else extra_ids)
    if (directory / "tokenizer.json").is_file():
        raise InputError(
            f"{directory} has tokenizer.json but no {SPIECE_NAME}: copy {SPIECE_NAME} "
            "there from the model it was fine-tuned from"
        )
    if values.get("vocab_size") == ByteVocabulary().vocab_size:
        return ByteVocabulary()
    raise InputError(f"no vocabulary at {spiece}: copy {SPIECE_NAME} there")


def _check_added_tokens(tokenizer: dict[str, Any], vocabulary: Vocabulary, directory: Path) -> None:
    """Refuses tokens that exist in the tokenizer alone: their text would be lost."""
    decoder = tokenizer.get("added_tokens_decoder") or {}
    added_path = directory / "added_tokens.json"
    others = read_json(added_path) if added_path.is_file() else {}
    try:
        added = {int(i): token.get("content") for i, token in decoder.items()}
        added |= {int(i): token for token, i in others.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"{directory} names its added tokens in a way that cannot be read "
            f"({one_line(error)}): copy its tokenizer's files again"
        ) from error
    foreign = sorted(i for i in added if i >= vocabulary.vocab_size)
    if foreign:
        raise InputError(
            f"{directory} adds token {added[foreign[0]]!r} with id {foreign[0]} to "
            f"the {vocabulary.vocab_size} of its vocabulary: give a model without "
            "added tokens"
        )


def _tokenizer_values(vocabulary: Vocabulary) -> dict[str, Any]:
    is_bytes = isinstance(vocabulary, ByteVocabulary)
    return {
        "tokenizer_class": "ByT5Tokenizer" if is_bytes else "T5Tokenizer",
        "extra_ids": vocabulary.extra_ids,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
