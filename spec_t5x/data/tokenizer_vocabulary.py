"""The vocabulary of a ``tokenizer.json``, which the ``tokenizers`` library reads."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from spec_t5x.data.vocabulary import Vocabulary, ids_before_eos
from spec_t5x.errors import InputError, as_input_error
from spec_t5x.machine.git_lfs import check_fetched

TOKENIZER_NAME = "tokenizer.json"


class TokenizerVocabulary(Vocabulary):
    """A vocabulary over a tokenizer of the ``tokenizers`` library, with the tokenizer's ids."""

    extra_ids = 0

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        remedy = "give other texts, or add an unknown token to its model"
        with as_input_error("the tokenizer cannot encode a text", remedy, Exception):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [self.from_theirs(encoding.ids) for encoding in encodings]

    def from_theirs(self, ids: list[int]) -> list[int]:
        """Maps the tokenizer's ids to the vocabulary's, which are equal in this class."""
        return ids

    def to_theirs(self, ids: Iterable[int]) -> list[int]:
        """Maps the vocabulary's ids to the tokenizer's, which are equal in this class."""
        return list(ids)

    def decode(self, ids: Iterable[int]) -> str:
        theirs = self.to_theirs(ids_before_eos(ids, self.vocab_size, self.eos_ids))
        return self._tokenizer.decode(theirs, skip_special_tokens=False)

    def piece(self, token: int) -> str:
        (theirs,) = self.to_theirs([token])
        return self._tokenizer.id_to_token(theirs) or f"<{theirs}>"

    def save(self, directory: str | Path) -> None:
        """Writes ``directory/tokenizer.json``."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(Path(directory) / TOKENIZER_NAME))


def type_of_model(values: dict[str, Any]) -> str:
    """Returns the type of model in the values of a ``tokenizer.json``; old files leave it out."""
    model = values["model"]
    if model.get("type") is not None:
        return model["type"]
    if isinstance(model["vocab"], list):
        return "Unigram"
    if "merges" in model:
        return "BPE"
    return "WordPiece" if "continuing_subword_prefix" in model else "WordLevel"


def kind_of_tokenizer(path: Path) -> str:
    """Returns the type of model in a ``tokenizer.json``, in lower case (``unigram``).

    Raises ``InputError`` if the file is absent, cannot be read, or has no model.
    """
    if not path.is_file():
        raise InputError(f"no vocabulary at {path}: give a {TOKENIZER_NAME}")
    what = f"{path} is not a tokenizer of the tokenizers library"
    with as_input_error(what, f"give a {TOKENIZER_NAME}", Exception):
        check_fetched(path)
        return type_of_model(json.loads(path.read_bytes())).lower()
