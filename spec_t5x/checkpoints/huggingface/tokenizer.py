"""The vocabulary of a T5 in Hugging Face's files: ``spiece.model``, or ByT5's bytes."""

from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.storage.files import describing, read_json
from spec_t5x.data.vocabulary import (
    SPIECE_NAME,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
from spec_t5x.errors import InputError

CONFIG_NAME = "tokenizer_config.json"


def read_vocabulary(directory: Path, values: dict[str, Any]) -> Vocabulary | None:
    """The vocabulary of a checkpoint whose config.json holds ``values``; None without files.

    Raises:
        InputError: one that is not T5's kind.
    """
    tokenizer, spiece = _read_if_there(directory, CONFIG_NAME), directory / SPIECE_NAME
    extra_ids = tokenizer.get("extra_ids")
    if str(tokenizer.get("tokenizer_class", "")).startswith("ByT5"):
        vocabulary = ByteVocabulary(125 if extra_ids is None else extra_ids)
    elif spiece.is_file():
        # mT5's file holds its sentinels already, T5's does not.
        default = 0 if values["model_type"] == "mt5" else 100
        vocabulary = SentencePieceVocabulary(spiece, default if extra_ids is None else extra_ids)
    elif values.get("vocab_size") == ByteVocabulary().vocab_size:
        vocabulary = ByteVocabulary()
    else:
        return None
    _check_added_tokens(tokenizer, vocabulary, directory)
    return vocabulary


def tokenizer_values(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer_config.json for transformers."""
    is_bytes = isinstance(vocabulary, ByteVocabulary)
    return {
        "tokenizer_class": "ByT5Tokenizer" if is_bytes else "T5Tokenizer",
        "extra_ids": vocabulary.extra_ids,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


def _read_if_there(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    return read_json(path) if path.is_file() else {}


def _check_added_tokens(tokenizer: dict[str, Any], vocabulary: Vocabulary, directory: Path) -> None:
    """Refuses tokens that exist in the tokenizer alone: their text would be lost."""
    decoder = tokenizer.get("added_tokens_decoder") or {}
    others = _read_if_there(directory, "added_tokens.json")
    with describing(f"tokenizer of {directory}", "added tokens"):
        added = {int(i): token.get("content") for i, token in decoder.items()}
        added |= {int(i): token for token, i in others.items()}
    foreign = sorted(i for i in added if i >= vocabulary.vocab_size)
    if foreign:
        raise InputError(
            f"{directory} adds token {added[foreign[0]]!r} with id {foreign[0]} to "
            f"the {vocabulary.vocab_size} of its vocabulary: give a model without "
            "added tokens"
        )
