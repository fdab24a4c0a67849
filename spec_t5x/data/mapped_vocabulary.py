"""Vocabularies of tokenizers whose start and EOS ids differ from T5's, for example GPT-2's.

A T5 starts (and pads) with id 0 and ends a text with id 1. Other tokenizers may use one token for
both, and id 0 for any token. So *their* ids are mapped to *ours*: 0 is a second copy of their start
token, 1 is their EOS, and their other tokens follow from 2 on in the same order.

    theirs      0    1    2   …   50255   50256 <|endoftext|>
    ours        2    3    4   …   50257   1 (and 0, as the start)
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from spec_t5x.data.tokenizer_vocabulary import TOKENIZER_NAME, TokenizerVocabulary, type_of_model
from spec_t5x.data.vocabulary import MODEL_NAME, SPIECE_NAME, ids_before_eos, is_sentinel
from spec_t5x.errors import InputError, as_input_error
from spec_t5x.machine.git_lfs import check_fetched
from spec_t5x.types import EOS_ID, Array, Int

# The two files of GPT-2's tokenizer from before ``tokenizer.json``, and the one of BERT's.
VOCAB_NAME, MERGES_NAME, WORDPIECE_NAME = "vocab.json", "merges.txt", "vocab.txt"
# Sets of files, each of which is a tokenizer.
_WHOLE = TOKENIZER_NAME, SPIECE_NAME, MODEL_NAME, WORDPIECE_NAME
SUFFICIENT = (*[(name,) for name in _WHOLE], (VOCAB_NAME, MERGES_NAME))


def their_ids(num_ids: int, start_id: int, eos_id: int) -> Int[Array, "ours"]:
    """Returns the array that maps our ids, 0 … ``num_ids``, to theirs, 0 … ``num_ids - 1``.

    Raises ``InputError`` if ``start_id`` or ``eos_id`` is not one of their ids.
    """
    for name, token in (("start", start_id), ("eos", eos_id)):
        if not 0 <= token < num_ids:
            raise InputError(f"the {name} token's id {token} is not below {num_ids}: lower it")
    return np.concatenate([[start_id, eos_id], np.delete(np.arange(num_ids), eos_id)])


class MappedVocabulary(TokenizerVocabulary):
    """A vocabulary over a tokenizer of the ``tokenizers`` library, with the ids mapped."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        num_ids: int,
        start_id: int,
        eos_id: int,
        more_eos_ids: Sequence[int] = (),
    ):
        """Maps the ids of ``tokenizer``, for a model of ``num_ids`` embeddings; all ids are theirs.

        ``more_eos_ids`` also end an output, but are ordinary tokens in a source.
        """
        self.num_ids, self.start_id, self.eos_id = num_ids, start_id, eos_id
        self.more_eos_ids = tuple(more_eos_ids)
        self._theirs = their_ids(num_ids, start_id, eos_id)
        # Skips our id 0, so that the start token in a text maps to its other id.
        self._ours = np.argsort(self._theirs[1:], kind="stable") + 1
        self._original = tokenizer
        # Sentinels and ordinary pieces that start or end a text are tokens in a source, too.
        special = self.special.items()
        hidden = {token for token, name in special if not is_sentinel(name)} & {start_id, eos_id}
        super().__init__(of_text(json.loads(tokenizer.to_str()), hidden))
        self.source_frame = frame_of(self._tokenizer, self.from_theirs)
        self.eos_ids = (EOS_ID, *self.from_theirs(self.more_eos_ids))
        (self.start_in_text,) = self.from_theirs([start_id])

    @property
    def vocab_size(self) -> int:
        return len(self._theirs)

    def from_theirs(self, ids: Sequence[int]) -> list[int]:
        """Maps their ids to ours.

        Raises ``InputError`` if an id is ``num_ids`` or higher: the model does not embed it.
        """
        if ids and max(ids) >= self.num_ids:
            raise InputError(
                f"the tokenizer gives id {max(ids)} and the model has {self.num_ids}: give the "
                "tokenizer that the model was trained with"
            )
        return self._ours[np.asarray(ids, np.int64)].tolist()

    def to_theirs(self, ids: Iterable[int]) -> list[int]:
        """Maps our ids to theirs."""
        return self._theirs[np.asarray(list(ids), np.int64)].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of our ids up to the first EOS, without the special tokens."""
        theirs = self.to_theirs(ids_before_eos(ids, self.vocab_size, self.eos_ids))
        return self.cleaned(self._original.decode(theirs, skip_special_tokens=True))

    @property
    def model_type(self) -> str:
        """Type of the tokenizer's model, such as "BPE"."""
        return type(self._original.model).__name__

    @property
    def special(self) -> dict[int, str]:
        """Names of the tokenizer's special tokens, by their ids."""
        added = self._original.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    def named_pieces(self) -> list[str]:
        """Returns the pieces of our ids up to the last token: a model may have more embeddings."""
        names = map(self._original.id_to_token, self._theirs.tolist())
        named = [name is not None for name in names]
        return [self.piece(token) for token in range(len(named) - named[::-1].index(True))]

    def save(self, directory: str | Path) -> None:
        """Writes ``directory/tokenizer.json``, the tokenizer with their ids."""
        TokenizerVocabulary(self._original).save(directory)


def frame_of(
    tokenizer: tokenizers.Tokenizer, ours: Callable[[list[int]], list[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the (before, after) ids that a tokenizer adds to a source, mapped by ``ours``."""
    around = tokenizer.encode("a")
    # Without padding, which a file may ask for.
    kept = np.flatnonzero(around.attention_mask)
    ids = ours(np.array(around.ids)[kept].tolist())
    places = np.flatnonzero(np.array(around.special_tokens_mask)[kept] == 0)
    start, end = (places[0], places[-1] + 1) if places.size else (0, 0)
    if end - start != sum(tokenizer.encode("a", add_special_tokens=False).attention_mask):
        raise InputError(f"the post_processor makes {around.tokens} of 'a': give it one $A")
    return tuple(ids[:start]), tuple(ids[end:])


def of_text(values: dict[str, Any], special: Collection[int]) -> tokenizers.Tokenizer:
    """Makes a tokenizer of a ``tokenizer.json`` that encodes names of ``special`` ids as text."""
    others = [token for token in values["added_tokens"] if token["id"] not in special]
    # Callers truncate and pad, each to a limit that the file does not know.
    changed, model = {"added_tokens": others, "truncation": None, "padding": None}, values["model"]
    if type_of_model(values) == "Unigram":
        # No word contains a space, so that no text matches these pieces.
        pieces = [
            (f" {name}" if token in special else name, score)
            for token, (name, score) in enumerate(model["vocab"])
        ]
        changed["model"] = model | {"vocab": pieces}
    return tokenizers.Tokenizer.from_str(json.dumps(values | changed))


def tokenizer_of(values: dict[str, Any], source: object) -> tokenizers.Tokenizer:
    """Makes a tokenizer of a ``tokenizer.json``; ``InputError`` names ``source`` if it cannot."""
    with reading_tokenizer(source):
        return tokenizers.Tokenizer.from_str(json.dumps(values))


def reading_tokenizer(source: object) -> contextlib.AbstractContextManager[None]:
    """Turns all errors of the code inside, which reads a tokenizer, into an ``InputError``."""
    what, remedy = f"cannot read the tokenizer in {source}", "copy its files again"
    return as_input_error(what, remedy, Exception)


def read_tokenizer(path: Path) -> tokenizers.Tokenizer | None:
    """Reads a ``tokenizer.json``, or a directory's; returns None if there is none."""
    whole = path if path.is_file() else path / TOKENIZER_NAME
    check_fetched(whole)
    with reading_tokenizer(path):
        return tokenizers.Tokenizer.from_file(str(whole)) if whole.is_file() else None
